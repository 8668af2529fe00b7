"""Samples behind rows of a step: what may not be sampled, candidates for beams, adjusted logits, a token for each other
row, and the log-probabilities that are asked for.

Which rows a step samples behind, what tokens become of, and what becomes of a sequence that fails, is the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels.backend import Backend
from octavo_worker.bans import Bans, Problem
from octavo_worker.processors import LogitProcessors
from octavo_worker.sampler import Likeliest, candidates, finite_rows, log_probabilities, sample
from octavo_worker.sequences import NEEDS_LOGITS, NEEDS_NOISE, IntArray, SequenceTable

if TYPE_CHECKING:
    from octavo_worker.grammar import PendingMasks

NOT_FINITE: Problem = (pb.SEQUENCE_ERROR_CODE_NUMERIC, "the model's logits are not finite")


@dataclass(frozen=True)
class RowLogits:
    """What a model says behind S rows, computed when it is asked for.

    logits: gives (S, vocab) fp32; greedy: gives the ids of the greatest of them alone, (S,) int64, -1 where they are
    not finite.
    """

    logits: Callable[[], Tensor]
    greedy: Callable[[], Tensor]


@dataclass(frozen=True)
class SampledRows:
    """What sampling behind some rows came to, by index among them.

    kept: (K,) int64, those with a token; token_ids: (K,) int64; problems: why others have none. Beams are in neither.
    """

    kept: IntArray
    token_ids: IntArray
    problems: dict[int, Problem]


class StepSampler:
    """Samples with one backend and the processors of a worker's sequences."""

    def __init__(self, backend: Backend, processors: LogitProcessors) -> None:
        self._backend, self._processors = backend, processors

    def sample(
        self,
        row_logits: RowLogits,
        table: SequenceTable,
        rows: IntArray,
        positions: IntArray,
        sequence_ids: Sequence[int],
        masks: PendingMasks | None,
        result: pb.StepResult,
    ) -> SampledRows:
        """Samples one token a row, or finds candidates.

        rows: (S,), whose of the table; positions: (S,), where in its sequence a row's token is going to be;
        sequence_ids: (S,); masks: of their grammars. Candidates and log-probabilities are added to the result.
        """
        needs = table.needs(rows)
        if not needs & NEEDS_LOGITS:
            if needs & NEEDS_NOISE:
                drawn = sample(row_logits.logits(), table.params[rows], positions, self._backend)
            else:
                drawn = row_logits.greedy()
            token_ids = drawn.cpu().numpy()
            is_finite = token_ids >= 0
            if is_finite.all():
                return SampledRows(np.arange(len(rows)), token_ids, {})
            left = np.flatnonzero(is_finite)
            return SampledRows(left, token_ids[left], _not_finite(is_finite))
        params = table.params[rows]
        logits = row_logits.logits()
        is_finite = finite_rows(logits)
        problems = _not_finite(is_finite)
        left, logits = np.flatnonzero(is_finite), _take(logits, is_finite)
        bans = self._processors.bans(table, rows[left], positions[left], masks)
        if bans.problems:
            problems |= {int(left[index]): problem for index, problem in bans.problems.items()}
            has_tokens = np.ones(len(left), np.bool_)
            has_tokens[list(bans.problems)] = False
            left, logits, bans = left[has_tokens], _take(logits, has_tokens), bans.take(has_tokens)
        is_beam = params["num_candidates"][left] > 0
        if is_beam.any():
            beams = left[is_beam]
            found = candidates(
                _take(logits, is_beam), params["num_candidates"][beams], bans.take(is_beam), self._backend
            )
            _add_candidates(result, [sequence_ids[index] for index in beams.tolist()], found)
            left, logits, bans = left[~is_beam], _take(logits, ~is_beam), bans.take(~is_beam)
        if not len(left):
            return SampledRows(left, left, problems)
        token_ids = self._draw(logits, table, rows[left], positions[left], bans, result)
        return SampledRows(left, token_ids, problems)

    def _draw(
        self,
        logits: Tensor,
        table: SequenceTable,
        rows: IntArray,
        positions: IntArray,
        bans: Bans,
        result: pb.StepResult,
    ) -> IntArray:
        """A token for each row, (S,) int64, from logits that their sequences adjust; with its log-probabilities."""
        params = table.params[rows]
        wanted = params["return_logprobs"]
        changed = logits
        if len(bans.rows) or self._processors.adjusts(table, rows):
            changed = logits.clone() if wanted.any() else logits  # log-probabilities are the model's own
            self._processors.adjust(changed, table, rows)
            bans.apply(changed, self._backend)
        token_ids = sample(changed, params, positions, self._backend)
        if wanted.any():
            num_tops = params["num_top_logprobs"][wanted]
            _add_logprobs(result.logprobs, _take(logits, wanted), _take(token_ids, wanted), num_tops)
        drawn: IntArray = token_ids.cpu().numpy()
        return drawn


def _not_finite(is_finite: NDArray[np.bool_]) -> dict[int, Problem]:
    return dict.fromkeys(np.flatnonzero(~is_finite).tolist(), NOT_FINITE)


def _add_candidates(result: pb.StepResult, sequence_ids: Sequence[int], found: Likeliest) -> None:
    """Answers for beams, which get their next token by a fork."""
    ids, logprobs = _flat(found)
    ends = np.cumsum(found.counts)
    for sequence_id, start, end in zip(sequence_ids, ends - found.counts, ends, strict=True):
        result.candidates.add(sequence_id=sequence_id, token_ids=ids[start:end], logprobs=logprobs[start:end])


def _add_logprobs(columns: pb.LogprobColumns, logits: Tensor, token_ids: Tensor, num_tops: IntArray) -> None:
    rows = log_probabilities(logits, token_ids, num_tops)
    columns.logprobs.extend(rows.logprobs.tolist())
    columns.top_counts.extend(rows.tops.counts.tolist())
    ids, logprobs = _flat(rows.tops)
    columns.top_token_ids.extend(ids)
    columns.top_logprobs.extend(logprobs)


def _flat(tops: Likeliest) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities, one row's behind the other's."""
    inside = np.arange(tops.ids.shape[1]) < tops.counts[:, None]
    return tops.ids.cpu().numpy()[inside].tolist(), tops.logprobs.cpu().numpy()[inside].tolist()


def _take(values: Tensor, mask: NDArray[np.bool_]) -> Tensor:
    """The rows of a mask; not copied where they are all."""
    return values if mask.all() else values.index_select(0, torch.from_numpy(np.flatnonzero(mask)).to(values.device))
