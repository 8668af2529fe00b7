"""A step's result, matched with the plan it answers, and the events that the scheduler makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from octavo_router.beam_search import Hypothesis
from octavo_router.plan import LogprobColumns, StepResult
from octavo_router.request import FinishReason, TokenLogprobs
from octavo_router.sequence import Sequence, SequenceGroup


class ProtocolError(Exception):
    """A worker's answer does not fit what was asked. The session cannot go on."""


class TokenSampled(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """A prompt's log-probabilities are complete, or the request ended with its prompt (is_end)."""

    group: SequenceGroup
    is_end: bool


Event = TokenSampled | BeamsFinished | RequestFailed | PromptComputed

SampledToken = tuple[Sequence, int, TokenLogprobs | None]
BeamCandidates = tuple[Sequence, list[tuple[int, float]]]
PromptStretch = tuple[Sequence, int, LogprobColumns]


@dataclass(frozen=True, slots=True)
class PlanInFlight:
    """What must be remembered of a plan until its result is back.

    computed: each scheduled sequence, with the position up to which it is computed then; sampled: those of them that a
    token, or candidates, are due for. prompts: those whose request watches its prompt and that compute some of it.
    """

    step_seq: int
    num_tokens: int
    computed: list[tuple[Sequence, int]]
    sampled: list[Sequence]
    prompts: list[tuple[Sequence, int]] = field(default_factory=list)


def match_tokens(plan: PlanInFlight, result: StepResult) -> list[SampledToken]:
    """A result's tokens with the sequences they are for. Those that ended meanwhile, of failed ones perhaps none, are
    among them.

    Raises ProtocolError where the result does not fit the plan; changes nothing.
    """
    sequences = [sequence for sequence in plan.sampled if sequence.group.beams is None]
    if [sequence.sequence_id for sequence in sequences] != result.sequence_ids:
        sequences = _answered(plan, result, sequences)
    if len(result.token_ids) != len(sequences):
        raise ProtocolError(
            f"step {plan.step_seq} brought {len(result.token_ids)} tokens for {len(sequences)} sequences"
        )
    asked = [sequence.group.returns_logprobs for sequence in sequences]
    if not any(asked):
        return [(sequence, token_id, None) for sequence, token_id in zip(sequences, result.token_ids, strict=True)]
    try:
        entries = iter(result.logprobs.unpack(list(compress(result.token_ids, asked))))
    except ValueError as error:
        raise ProtocolError(f"step {plan.step_seq} brought log-probabilities that do not fit: {error}") from error
    return [
        (sequence, token_id, next(entries) if has_logprobs else None)
        for sequence, token_id, has_logprobs in zip(sequences, result.token_ids, asked, strict=True)
    ]


def _answered(plan: PlanInFlight, result: StepResult, due: list[Sequence]) -> list[Sequence]:
    """Those that a token came for, where not all that were due have one. Raises as `match_tokens`."""
    answered = set(result.sequence_ids)
    sequences = [sequence for sequence in due if sequence.sequence_id in answered]
    if [sequence.sequence_id for sequence in sequences] != result.sequence_ids:
        raise ProtocolError(f"step {plan.step_seq} brought tokens for sequences {result.sequence_ids}, not as planned")
    _check_answered(plan, result, due, answered, "token")
    return sequences


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


def match_prompts(plan: PlanInFlight, result: StepResult) -> list[PromptStretch]:
    """A result's log-probabilities of prompts with the sequences they are for, without those that ended meanwhile.

    Raises ProtocolError where the result does not fit the plan; changes nothing.
    """
    if not plan.prompts and not result.prompt_logprobs:
        return []
    asked = {member.sequence_id: member for member, _ in plan.prompts if member.group.prompt_scores is not None}
    found: list[PromptStretch] = []
    num_there: dict[SequenceGroup, int] = {}
    for stretch in result.prompt_logprobs:
        sequence = asked.get(stretch.sequence_id)
        if sequence is None or sequence.group.prompt_scores is None:
            raise ProtocolError(f"step {plan.step_seq} brought the prompt of sequence {stretch.sequence_id}, unasked")
        if not sequence.is_live:
            continue
        try:
            num_there[sequence.group] = sequence.group.prompt_scores.num_after(stretch.start_position, stretch.columns)
        except ValueError as error:
            raise ProtocolError(f"step {plan.step_seq} brought a prompt that does not fit: {error}") from error
        found.append((sequence, stretch.start_position, stretch.columns))
    failed = {error.sequence_id for error in result.errors}
    for sequence, num_computed in plan.prompts:
        scores = sequence.group.prompt_scores
        if scores is None or not sequence.is_live or sequence.sequence_id in failed:
            continue
        if num_there.get(sequence.group, scores.num_scored) < scores.num_due(num_computed):
            raise ProtocolError(f"step {plan.step_seq} brought too little of the prompt of {sequence.sequence_id}")
    return found


def _check_answered(plan: PlanInFlight, result: StepResult, due: list[Sequence], answered: set[int], what: str) -> None:
    failed = {error.sequence_id for error in result.errors}
    for sequence in due:
        if sequence.is_live and sequence.sequence_id not in answered and sequence.sequence_id not in failed:
            raise ProtocolError(f"step {plan.step_seq} brought no {what} for sequence {sequence.sequence_id}")
