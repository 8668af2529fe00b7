"""Turns the scheduled sequences of a plan into the tensors of one forward pass.

Prefill chunks and decodes stand side by side; nothing loops over tokens or sequences. The sequences were checked before
(`executor`).
"""

from __future__ import annotations

from dataclasses import dataclass

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


def build_batch(
    table: SequenceTable, rows: IntArray, starts: IntArray, counts: IntArray, *, block_size: int, device: torch.device
) -> Batch:
    """The batch of tokens starts[i] to starts[i] + counts[i] of the sequences in rows[i].

    Each count is at least 1, all tokens are known, and the block tables cover them.
    """
    ends = starts + counts
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    owners = np.repeat(np.arange(len(rows)), counts)  # (T,) the sequence of each token
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    block_tables = table.blocks.padded(rows, -(-int(ends.max()) // block_size))
    slots = block_tables[owners, positions // block_size] * block_size + positions % block_size
    attention = AttentionBatch(
        positions=_to(device, positions),
        slots=_to(device, slots),
        query_starts=_to(device, query_starts),
        context_lens=_to(device, ends),
        block_tables=_to(device, block_tables),
    )
    prompt_lens = table.params["prompt_len"][rows][owners]
    return Batch(_to(device, table.tokens.gather(rows, starts, counts)), attention, _to(device, prompt_lens))


def _to(device: torch.device, values: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device, non_blocking=True)
