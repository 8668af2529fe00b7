"""What the worker remembers of each sequence: its tokens, its block table and how it is sampled.

Everything is in arrays with a row for each sequence, so that a step over many sequences is a few gathers. Block ids
are taken as the router gives them; whether a plan makes sense is checked by `executor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from octavo_worker.processors import SequenceProcessors

IntArray = NDArray[np.int64]
TokenArray = NDArray[np.int32]

# Below this a temperature is taken as 0: the likeliest token. Dividing by it would overflow long before it mattered.
MIN_TEMPERATURE = 1e-5
# What sampling a sequence's tokens takes beyond the greatest logit, in the bits of a number.
NEEDS_NOISE = 1
NEEDS_LOGITS = 2
"""Something but the sampler looks at its logits."""
NEEDS_PROMPT_SCORES = 4

# One sequence's sampling parameters and the length of its prompt. needs: `NEEDS_...`, from the others; seed: the 64
# bits of the key; num_candidates: above 0 for a beam, which is not sampled.
PARAMS_DTYPE = np.dtype(
    [
        ("needs", np.uint8),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("min_p", np.float32),
        ("seed", np.int64),
        ("return_logprobs", np.bool_),
        ("num_top_logprobs", np.int64),
        ("return_prompt_logprobs", np.bool_),
        ("num_top_prompt_logprobs", np.int64),
        ("min_tokens", np.int64),
        ("has_suppressed", np.bool_),
        ("has_bans", np.bool_),
        ("has_grammar", np.bool_),
        ("has_adjustments", np.bool_),
        ("prompt_len", np.int64),
        ("num_candidates", np.int64),
    ]
)
UNKNOWN_TOKEN = -1
_MIN_CAPACITY = 16


class RaggedRows:
    """Rows of int32 of different lengths in one flat array; appending and gathering work on many rows at once.

    lengths: (rows,) int64. A row that outgrows its stretch moves to a new one of twice the size; stretches left behind
    are reclaimed when the array is full.
    """

    def __init__(self, num_rows: int, num_items: int = 1024) -> None:
        self.lengths: IntArray = np.zeros(num_rows, np.int64)
        self._data: TokenArray = np.zeros(num_items, np.int32)
        self._starts: IntArray = np.zeros(num_rows, np.int64)
        self._capacities: IntArray = np.zeros(num_rows, np.int64)
        self._end = 0

    def add_rows(self, count: int) -> None:
        """Appends empty rows."""
        more = np.zeros(count, np.int64)
        self.lengths = np.concatenate([self.lengths, more])
        self._starts = np.concatenate([self._starts, more])
        self._capacities = np.concatenate([self._capacities, more])

    def set(self, row: int, values: TokenArray) -> None:
        """Replaces a row."""
        self.lengths[row] = 0
        if len(values) > self._capacities[row]:
            self._move(row, len(values))
        start = self._starts[row]
        self._data[start : start + len(values)] = values
        self.lengths[row] = len(values)

    def clear(self, row: int) -> None:
        """Empties a row and gives its stretch back."""
        self.lengths[row] = self._capacities[row] = 0

    def get(self, row: int) -> TokenArray:
        """A view of a row; valid until the next change."""
        start = self._starts[row]
        return self._data[start : start + self.lengths[row]]

    def append(self, rows: IntArray, counts: IntArray, values: TokenArray) -> None:
        """Appends counts[i] values to rows[i], each at most once; values: the rows' own, one behind the other."""
        lengths = self.lengths[rows]
        needed = lengths + counts
        self._reserve(rows, needed)
        self._data[_ranges(self._starts[rows] + lengths, counts)] = values
        self.lengths[rows] = needed

    def gather(self, rows: IntArray, firsts: IntArray, counts: IntArray) -> TokenArray:
        """Items firsts[i] to firsts[i] + counts[i] of each row, one row's behind the other's."""
        return self._data[_ranges(self._starts[rows] + firsts, counts)]

    def append_one(self, rows: IntArray, values: TokenArray) -> None:
        """Appends values[i] to rows[i], each at most once."""
        lengths = self.lengths[rows]
        needed = lengths + 1
        self._reserve(rows, needed)
        self._data[self._starts[rows] + lengths] = values
        self.lengths[rows] = needed

    def pick(self, rows: IntArray, indices: IntArray) -> TokenArray:
        """Item indices[i] of row rows[i], which has it."""
        items: TokenArray = self._data[self._starts[rows] + indices]
        return items

    def replace(self, rows: IntArray, indices: IntArray, values: TokenArray) -> None:
        """Writes values[i] over item indices[i] of row rows[i], which has it."""
        self._data[self._starts[rows] + indices] = values

    def padded(self, rows: IntArray, width: int) -> TokenArray:
        """(len(rows), width): the first items of each row, padded with 0."""
        columns, lengths = np.arange(width), self.lengths[rows]
        places = self._starts[rows][:, None] + columns
        if (lengths >= width).all():
            items: TokenArray = self._data[places]
            return items
        inside = columns < lengths[:, None]
        return np.where(inside, self._data[np.where(inside, places, 0)], 0)

    def _reserve(self, rows: IntArray, needed: IntArray) -> None:
        """Moves the rows whose stretches have no room for needed[i] items."""
        is_short = needed > self._capacities[rows]
        if is_short.any():
            for row, length in zip(rows[is_short].tolist(), needed[is_short].tolist(), strict=True):
                self._move(row, length)

    def _move(self, row: int, needed: int) -> None:
        """Gives a row a new stretch for `needed` items or more, and takes its items along."""
        capacity = max(_MIN_CAPACITY, 1 << (needed - 1).bit_length())
        if self._end + capacity > len(self._data):
            self._make_room(capacity)
        start, length = self._starts[row], self.lengths[row]
        self._data[self._end : self._end + length] = self._data[start : start + length]
        self._starts[row], self._capacities[row] = self._end, capacity
        self._end += capacity

    def _make_room(self, capacity: int) -> None:
        """Moves all rows to the front of an array that has room for `capacity` more, and as much again."""
        used = int(self._capacities.sum()) + capacity
        size = len(self._data) if 2 * used <= len(self._data) else 1 << (2 * used - 1).bit_length()
        data: TokenArray = np.zeros(size, np.int32)
        at = 0
        for row in np.flatnonzero(self._capacities):
            start, room = int(self._starts[row]), int(self._capacities[row])
            data[at : at + room] = self._data[start : start + room]
            self._starts[row] = at
            at += room
        self._data, self._end = data, at


class SequenceTable:
    """All sequences of a session.

    rows: sequence id to row. tokens: prompt and output, `UNKNOWN_TOKEN` where it is not back from the device; blocks:
    block table; params: see `PARAMS_DTYPE`; processors: row to what changes its logits, for the sequences that have
    such parameters; versions: (rows,) int64, which grows whenever a row's sequence becomes another one, or none.
    """

    def __init__(self, num_rows: int = 64) -> None:
        self.rows: dict[int, int] = {}
        self.tokens = RaggedRows(num_rows, 1 << 14)
        self.blocks = RaggedRows(num_rows)
        self.params = np.zeros(num_rows, PARAMS_DTYPE)
        self.processors: dict[int, SequenceProcessors] = {}
        self.versions: IntArray = np.zeros(num_rows, np.int64)
        self._free = list(range(num_rows - 1, -1, -1))

    def put(
        self,
        sequence_id: int,
        tokens: TokenArray,
        blocks: TokenArray,
        prompt_len: int,
        params: pb.SequenceParams,
        processors: SequenceProcessors | None = None,
    ) -> int:
        """Adds a sequence, or replaces it. processors: its own. Returns its row."""
        row = self._set(sequence_id, tokens, blocks, processors)
        options = None if processors is None else processors.options
        needs = 0 if np.float32(params.temperature) < MIN_TEMPERATURE else NEEDS_NOISE  # as the sampler compares
        if options is not None or params.return_logprobs or params.candidate_count > 0:
            needs |= NEEDS_LOGITS
        if params.return_prompt_logprobs:
            needs |= NEEDS_PROMPT_SCORES
        self.params[row] = (
            needs,
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
            params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed,
            params.return_logprobs,
            params.top_logprob_count,
            params.return_prompt_logprobs,
            params.top_prompt_logprob_count,
            params.min_token_count,
            options is not None and options.unsuppressed is not None,
            options is not None and options.has_bans,
            options is not None and bool(options.grammar),
            options is not None and options.has_adjustments,
            prompt_len,
            params.candidate_count,
        )
        return row

    def fork(
        self,
        params: np.void,
        processors: SequenceProcessors | None,
        child_id: int,
        tokens: TokenArray,
        blocks: TokenArray,
    ) -> int:
        """Adds a sequence, or replaces it, that is sampled with a parent's params and processors; gives its row."""
        row = self._set(child_id, tokens, blocks, None if processors is None else processors.fresh())
        self.params[row] = params
        return row

    def remove(self, sequence_id: int) -> None:
        """Forgets a sequence; an unknown id is no error."""
        row = self.rows.pop(sequence_id, None)
        if row is None:
            return
        self.versions[row] += 1
        self.tokens.clear(row)
        self.blocks.clear(row)
        self.processors.pop(row, None)
        self._free.append(row)

    def needs(self, rows: IntArray) -> int:
        """What the sequences in rows need together: `NEEDS_...`."""
        return int(np.bitwise_or.reduce(self.params["needs"][rows]))

    def find(self, sequence_ids: list[int]) -> IntArray:
        """The rows of sequences; -1 for unknown ones."""
        find = self.rows.get
        return np.array([find(sequence_id, -1) for sequence_id in sequence_ids], np.int64)

    def _set(
        self, sequence_id: int, tokens: TokenArray, blocks: TokenArray, processors: SequenceProcessors | None
    ) -> int:
        """Replaces all of a sequence but its params. Returns its row."""
        row = self._row_for(sequence_id)
        self.versions[row] += 1
        self.tokens.set(row, tokens)
        self.blocks.set(row, blocks)
        self.processors.pop(row, None)
        if processors is not None:
            self.processors[row] = processors
        return row

    def _row_for(self, sequence_id: int) -> int:
        row = self.rows.get(sequence_id)
        if row is not None:
            return row
        if not self._free:
            count = len(self.params)
            self.tokens.add_rows(count)
            self.blocks.add_rows(count)
            self.params = np.concatenate([self.params, np.zeros(count, PARAMS_DTYPE)])
            self.versions = np.concatenate([self.versions, np.zeros(count, np.int64)])
            self._free = list(range(2 * count - 1, count - 1, -1))
        row = self._free.pop()
        self.rows[sequence_id] = row
        return row


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """starts[0], starts[0] + 1, … (counts[0] numbers), starts[1], …"""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))
