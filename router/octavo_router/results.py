"""A step's result, matched with the plan it answers, and the events that the scheduler makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

from octavo_router.plan import StepResult
from octavo_router.request import FinishReason, TokenLogprobs
from octavo_router.sequence import Sequence, SequenceGroup


class ProtocolError(Exception):
    """A worker's answer does not fit what was asked. The session cannot go on."""


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """A sequence gained a token. With a finish_reason it ended with it; matched: the stop or end-of-sequence id."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched: int | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ended with all its samples, for a reason of its own."""

    group: SequenceGroup
    message: str


Event = TokenSampled | RequestFailed


@dataclass(frozen=True, slots=True)
class PlanInFlight:
    """What must be remembered of a plan until its result is back."""

    step_seq: int
    num_tokens: int
    sampled: list[Sequence]


def match_tokens(plan: PlanInFlight, result: StepResult) -> list[tuple[Sequence, int, TokenLogprobs | None]]:
    """A result's tokens with the sequences they are for. Those that ended meanwhile, of failed ones perhaps none, are
    among them.

    Raises ProtocolError where the result does not fit the plan; changes nothing.
    """
    failed = {error.sequence_id for error in result.errors}
    answered = set(result.sequence_ids)
    sequences = [sequence for sequence in plan.sampled if sequence.sequence_id in answered]
    if [sequence.sequence_id for sequence in sequences] != result.sequence_ids:
        raise ProtocolError(f"step {plan.step_seq} brought tokens for sequences {result.sequence_ids}, not as planned")
    for sequence in plan.sampled:
        if sequence.is_live and sequence.sequence_id not in answered and sequence.sequence_id not in failed:
            raise ProtocolError(f"step {plan.step_seq} brought no token for sequence {sequence.sequence_id}")
    if len(result.token_ids) != len(sequences):
        raise ProtocolError(
            f"step {plan.step_seq} brought {len(result.token_ids)} tokens for {len(sequences)} sequences"
        )
    asked = [sequence.group.request.output.logprobs is not None for sequence in sequences]
    asked_token_ids = list(compress(result.token_ids, asked))
    try:
        entries = iter(result.logprobs.unpack(asked_token_ids) if asked_token_ids else ())
    except ValueError as error:
        raise ProtocolError(f"step {plan.step_seq} brought log-probabilities that do not fit: {error}") from error
    return [
        (sequence, token_id, next(entries) if has_logprobs else None)
        for sequence, token_id, has_logprobs in zip(sequences, result.token_ids, asked, strict=True)
    ]
