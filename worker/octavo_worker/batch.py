"""Turns the scheduled sequences of a plan into the tensors of one forward pass.

Prefill chunks and decodes stand side by side; nothing loops over tokens or sequences. The sequences were checked before
(`executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.backend import AttentionBatch
from octavo_worker.sequences import IntArray, SequenceTable


@dataclass(frozen=True)
class Batch:
    """One pass over T tokens.

    token_ids: (T,) int32; prompt_lens: (T,) int32, the length of the prompt of each token's sequence.
    """

    token_ids: Tensor
    attention: AttentionBatch
    prompt_lens: Tensor


# Brings columns to a device: `devices.Device.upload`.
Upload = Callable[[Sequence[NDArray[Any]]], list[Tensor]]


def build_batch(
    table: SequenceTable,
    rows: IntArray,
    starts: IntArray,
    counts: IntArray,
    *,
    block_size: int,
    device: torch.device,
    upload: Upload | None = None,
) -> Batch:
    """The batch of tokens starts[i] to starts[i] + counts[i] of the sequences in rows[i].

    Each count is at least 1, and the block tables cover the tokens. upload: how columns get to the device; None copies
    one after the other.
    """
    ends = starts + counts
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    owners = np.repeat(np.arange(len(rows)), counts)  # (T,) the sequence of each token
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    block_tables = table.blocks.padded(rows, -(-int(ends.max()) // block_size))
    slots = block_tables[owners, positions // block_size] * block_size + positions % block_size
    columns = (
        table.tokens.gather(rows, starts, counts),
        positions,
        slots,
        query_starts,
        ends,
        block_tables,
        table.params["prompt_len"][rows][owners],
    )
    narrow = [np.ascontiguousarray(column, np.int32) for column in columns]
    brought = upload(narrow) if upload is not None else [_to(device, column) for column in narrow]
    token_ids, on_positions, on_slots, on_starts, context_lens, tables, prompt_lens = brought
    attention = AttentionBatch(on_positions, on_slots, on_starts, context_lens, tables, max_queries=int(counts.max()))
    return Batch(token_ids, attention, prompt_lens)


def _to(device: torch.device, values: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
