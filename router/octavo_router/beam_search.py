"""Beam search over one request: which beams go on with which tokens, which have ended, and when the search is over.

Equal to `GenerationMixin._beam_search` of transformers 5.23 for a decoder-only model and one prompt, including its
order of events and its fp32 arithmetic, so that near-ties fall the same way. Where transformers leaves the order of
exact ties to `torch.topk`, the lower beam and the earlier candidate win here, and an older hypothesis over a newer one.

Pure: candidates in, decisions out. Who computes the candidates, and what becomes of the beams' blocks, is the
scheduler's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo_router.request import Beams, EarlyStopping, FinishReason

_FLOAT32_MIN = 2.0**-126
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What follows from one step's candidates.

    Beam j of the next step continues beam parents[j] of this one with token_ids[j]; the likeliest comes first. Both
    have beam_width entries, or none once the search is done.
    """

    parents: list[int]
    token_ids: list[int]
    is_done: bool


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation of the prompt that has ended.

    token_ids: with the end-of-sequence token where finish_reason is STOP. cumulative_logprob: the sum of the tokens'
    log-probabilities. score: that sum divided by the number of tokens to the power of length_penalty.
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class _Beam:
    """The last token of a continuation and the beam that it continues; the prompt has neither."""

    token_id: int
    cumulative_logprob: float
    parent: _Beam | None

    def token_ids(self) -> list[int]:
        reversed_ids = []
        beam = self
        while beam.parent is not None:
            reversed_ids.append(beam.token_id)
            beam = beam.parent
        return reversed_ids[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class _Finished:
    """A beam that has ended. It holds tokens only as a link, until somebody asks for them."""

    beam: _Beam
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """The search of one request, from its prompt's candidates to its best hypotheses.

    max_tokens: most tokens to generate, at least 1. eos_token_ids: tokens that end a beam; none is fine. Raises
    ValueError where the parameters have no meaning or leave fp32's range.
    """

    def __init__(self, params: Beams, *, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        if params.beam_width < 1 or max_tokens < 1:
            raise ValueError(f"beam_width {params.beam_width} and max_tokens {max_tokens} must be at least 1")
        if not _is_length_penalty_in_range(params.length_penalty, max_tokens):
            raise ValueError(
                f"length_penalty {params.length_penalty}: {max_tokens} tokens to that power leave the range of fp32;"
                " use a penalty nearer to 0"
            )
        self.params = params
        self.max_tokens = max_tokens
        self.eos_token_ids = eos_token_ids
        self.is_done = False
        self._num_tokens = 0
        self._running = [_Beam(token_id=-1, cumulative_logprob=0.0, parent=None)]
        self._finished: list[_Finished] = []

    @property
    def num_candidates(self) -> int:
        """Candidates that a step needs of each beam."""
        return num_candidates_of(self.params.beam_width, len(self.eos_token_ids))

    @property
    def num_beams(self) -> int:
        """Beams whose candidates the next step takes: one, the prompt, before the first step; then beam_width; none
        once the search is done."""
        return len(self._running)

    def beam_token_ids(self, index: int) -> list[int]:
        """Tokens generated so far on a running beam."""
        return self._running[index].token_ids()

    def step(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> BeamStep:
        """Takes the candidates of each running beam, (token id, log-probability) in fp32, likeliest first.

        Raises ValueError, and changes nothing, where the lists are not one a beam or are shorter than num_candidates.
        """
        self._check(candidates)
        width = self.params.beam_width
        self._num_tokens += 1
        is_last = self._num_tokens == self.max_tokens
        ended: list[_Finished] = []
        parents: list[int] = []
        running: list[_Beam] = []
        for rank, (logprob, parent, token_id) in enumerate(self._continuations(candidates)):
            if rank >= width and len(running) == width:
                break
            beam = _Beam(token_id, logprob, self._running[parent])
            is_eos = token_id in self.eos_token_ids
            # Those behind the first beam_width are there to go on where likelier ones end; they do not end themselves.
            if rank < width and (is_eos or is_last) and logprob > -math.inf:
                reason = FinishReason.STOP if is_eos else FinishReason.LENGTH
                ended.append(_Finished(beam, self._score(logprob, self._num_tokens), reason))
            if not is_eos and len(running) < width:
                parents.append(parent)
                running.append(beam)
        # The sort is stable: among equal scores the oldest stays.
        self._finished = sorted([*self._finished, *ended], key=lambda hypothesis: -hypothesis.score)[:width]
        self.is_done = is_last or self._is_settled(running[0].cumulative_logprob)
        self._running = [] if self.is_done else running
        if self.is_done:
            return BeamStep([], [], is_done=True)
        return BeamStep(parents, [beam.token_id for beam in running], is_done=False)

    def hypotheses(self, n: int) -> list[Hypothesis]:
        """The n best, best first.

        Once the search is done there are beam_width of them, or as many as there are continuations of nonzero
        probability. Before, those that have ended so far.
        """
        return [
            Hypothesis(
                tuple(finished.beam.token_ids()),
                finished.beam.cumulative_logprob,
                finished.score,
                finished.finish_reason,
            )
            for finished in self._finished[:n]
        ]

    def _check(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> None:
        if self.is_done:
            raise ValueError("the search is done and takes no more candidates")
        if len(candidates) != len(self._running):
            raise ValueError(f"{len(candidates)} lists of candidates for {len(self._running)} beams")
        shortest = min(len(entries) for entries in candidates)
        if shortest < self.num_candidates:
            raise ValueError(
                f"{shortest} candidates for a beam, but a beam width of {self.params.beam_width} with"
                f" {len(self.eos_token_ids)} end-of-sequence tokens needs {self.num_candidates};"
                " a vocabulary that small needs a smaller beam width"
            )

    def _continuations(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, int, int]]:
        """(cumulative log-probability, parent, token id) of the continuations of all beams, likeliest first."""
        continuations = [
            (_float32(beam.cumulative_logprob + logprob), parent, token_id)
            for parent, (beam, entries) in enumerate(zip(self._running, candidates, strict=True))
            for token_id, logprob in entries
        ]
        return sorted(continuations, key=lambda continuation: -continuation[0])

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        # Both operands are fp32, as torch divides them; a quotient of doubles rounded once is then fp32's quotient.
        return _float32(cumulative_logprob / _float32(math.pow(num_tokens, self.params.length_penalty)))

    def _is_settled(self, best_logprob: float) -> bool:
        """Whether the search ends before max_tokens, given the sum of the likeliest running beam."""
        if best_logprob == -math.inf:
            return True  # nothing can follow
        if len(self._finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is EarlyStopping.TRUE:
            return True
        # With a positive penalty a long continuation scores higher than a short one of the same sum.
        looks_ahead = self.params.early_stopping is EarlyStopping.NEVER and self.params.length_penalty > 0
        best_score = self._score(best_logprob, self.max_tokens if looks_ahead else self._num_tokens)
        return best_score <= self._finished[-1].score


def num_candidates_of(beam_width: int, num_eos_tokens: int) -> int:
    """Candidates that a search needs of each beam and step; a vocabulary must have as many tokens.

    At least twice the beam width; more where there are more end-of-sequence tokens than beams. Then beam_width
    candidates that do not end are left even if every way to end is among the likeliest.
    """
    return max(2 * beam_width, beam_width + num_eos_tokens)


def _float32(value: float) -> float:
    """The value rounded to fp32."""
    return ctypes.c_float(value).value


def _is_length_penalty_in_range(length_penalty: float, max_tokens: int) -> bool:
    if not math.isfinite(length_penalty):
        return False
    try:
        return _FLOAT32_MIN <= math.pow(max_tokens, length_penalty) <= _FLOAT32_MAX
    except OverflowError:
        return False
