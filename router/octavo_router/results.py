"""A step's result, matched with the plan it answers, and the events that the scheduler makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

from octavo_router.beam_search import Hypothesis
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
class BeamsFinished:
    """A beam search ended. hypotheses: the n that the request asked for, best first; fewer where no more exist."""

    group: SequenceGroup
    hypotheses: list[Hypothesis]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ended with all its samples, for a reason of its own."""

    group: SequenceGroup
    message: str


Event = TokenSampled | BeamsFinished | RequestFailed

SampledToken = tuple[Sequence, int, TokenLogprobs | None]
BeamCandidates = tuple[Sequence, list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class PlanInFlight:
    """What must be remembered of a plan until its result is back.

    computed: each scheduled sequence, with the position up to which it is computed then; sampled: those of them that a
    token, or candidates, are due for.
    """

    step_seq: int
    num_tokens: int
    computed: list[tuple[Sequence, int]]
    sampled: list[Sequence]


def match_tokens(plan: PlanInFlight, result: StepResult) -> list[SampledToken]:
    """A result's tokens with the sequences they are for. Those that ended meanwhile, of failed ones perhaps none, are
    among them.

    Raises ProtocolError where the result does not fit the plan; changes nothing.
    """
    due = [sequence for sequence in plan.sampled if sequence.group.beams is None]
    answered = set(result.sequence_ids)
    sequences = [sequence for sequence in due if sequence.sequence_id in answered]
    if [sequence.sequence_id for sequence in sequences] != result.sequence_ids:
        raise ProtocolError(f"step {plan.step_seq} brought tokens for sequences {result.sequence_ids}, not as planned")
    _check_answered(plan, result, due, answered, "token")
    if len(result.token_ids) != len(sequences):
        raise ProtocolError(
            f"step {plan.step_seq} brought {len(result.token_ids)} tokens for {len(sequences)} sequences"
        )
    asked = [sequence.group.returns_logprobs for sequence in sequences]
    asked_token_ids = list(compress(result.token_ids, asked))
    try:
        entries = iter(result.logprobs.unpack(asked_token_ids) if asked_token_ids else ())
    except ValueError as error:
        raise ProtocolError(f"step {plan.step_seq} brought log-probabilities that do not fit: {error}") from error
    return [
        (sequence, token_id, next(entries) if has_logprobs else None)
        for sequence, token_id, has_logprobs in zip(sequences, result.token_ids, asked, strict=True)
    ]


def match_candidates(plan: PlanInFlight, result: StepResult) -> list[BeamCandidates]:
    """A result's candidates with the beams they are for. Those that ended meanwhile are among them.

    Raises ProtocolError where the result does not fit the plan; changes nothing.
    """
    due = {sequence.sequence_id: sequence for sequence in plan.sampled if sequence.group.beams is not None}
    answered = {candidates.sequence_id for candidates in result.candidates}
    if len(answered) != len(result.candidates) or not answered <= due.keys():
        raise ProtocolError(f"step {plan.step_seq} brought candidates for sequences {answered}, not as planned")
    _check_answered(plan, result, list(due.values()), answered, "candidates")
    try:
        return [
            (due[beam.sequence_id], list(zip(beam.token_ids, beam.logprobs, strict=True))) for beam in result.candidates
        ]
    except ValueError as error:
        raise ProtocolError(f"step {plan.step_seq} brought candidates whose columns do not fit: {error}") from error


def _check_answered(plan: PlanInFlight, result: StepResult, due: list[Sequence], answered: set[int], what: str) -> None:
    failed = {error.sequence_id for error in result.errors}
    for sequence in due:
        if sequence.is_live and sequence.sequence_id not in answered and sequence.sequence_id not in failed:
            raise ProtocolError(f"step {plan.step_seq} brought no {what} for sequence {sequence.sequence_id}")
