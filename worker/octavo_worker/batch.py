"""Turns the scheduled sequences of a plan into the tensors of one forward pass.

Prefill chunks and decodes stand side by side; nothing loops over tokens or sequences. The sequences were checked before
(`executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.backend import AttentionBatch
from octavo_worker.sequences import IntArray, SequenceTable


@dataclass(frozen=True)
class Batch:
    """One pass over T tokens.

    token_ids: (T,) int32; prompt_lens: (T,) int32, the length of the prompt of each token's sequence, or None where
    nobody asked.
    """

    token_ids: Tensor
    attention: AttentionBatch
    prompt_lens: Tensor | None


# Brings columns to a device: `devices.Device.upload`.
Upload = Callable[[Sequence[NDArray[Any]]], list[Tensor]]


def build_batch(
    table: SequenceTable,
    rows: IntArray,
    starts: IntArray,
    counts: IntArray,
    *,
    block_size: int,
    upload: Upload,
    with_prompt_lens: bool = False,
) -> Batch:
    """The batch of tokens starts[i] to starts[i] + counts[i] of the sequences in rows[i].

    Each count is at least 1, and the block tables cover the tokens.
    """
    ends = starts + counts
    most = int(counts.max())
    if most == 1:  # the step of every token but the first: a short way, for the device has nothing to do meanwhile
        query_starts = np.arange(len(rows) + 1)
        owners, positions = query_starts[:-1], starts
        tokens = table.tokens.pick(rows, starts)
    else:
        query_starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=query_starts[1:])
        owners = np.repeat(np.arange(len(rows)), counts)  # (T,) the sequence of each token
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
        tokens = table.tokens.gather(rows, starts, counts)
    block_tables = table.blocks.padded(rows, -(-int(ends.max()) // block_size))
    blocks, offsets = np.divmod(positions, block_size)
    slots = block_tables[owners, blocks] * block_size + offsets
    columns = [tokens, positions, slots, query_starts, ends, block_tables]
    if with_prompt_lens:
        columns.append(table.params["prompt_len"][rows][owners])
    brought = upload([np.ascontiguousarray(column, np.int32) for column in columns])
    token_ids, on_positions, on_slots, on_starts, context_lens, tables = brought[:6]
    attention = AttentionBatch(on_positions, on_slots, on_starts, context_lens, tables, max_queries=most)
    return Batch(token_ids, attention, brought[6] if with_prompt_lens else None)
