"""What a device remembers between decode steps, and how it becomes the next step's input.

The host need not know a sequence's last token to order its next step: it stays on the device, in the sequence's row, as
does the block table, of which only what is new travels. A step's lanes take what they need from there
(`Backend.advance_decode`). The inputs have one place in memory, so that a CUDA graph finds them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.backend import AttentionBatch

PADDING = -1
"""Row of a lane that stands for no sequence."""
FROM_STATE = -1
"""Token of a lane whose input is the last token in the state."""


@dataclass(frozen=True)
class DecodeState:
    """A row for each sequence.

    last_tokens: (rows,) int32, the last sampled token; block_tables: (rows, max_blocks) int32.
    """

    last_tokens: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class DecodeColumns:
    """What the host tells of a step of B lanes, one token each. All int32, contiguous, on the device.

    rows:       (B,) row in the state, PADDING for a lane without a sequence; no row twice
    positions:  (B,) position of the token that is computed
    token_ids:  (B,) the token, or FROM_STATE
    num_known:  (B,) blocks of the row that the state has already
    new_starts: (B + 1,) lane i brings new_blocks[new_starts[i]:new_starts[i + 1]], which go behind the known ones
    new_blocks: (N,) block ids; N is at least 1 and may be more than are brought
    """

    rows: Tensor
    positions: Tensor
    token_ids: Tensor
    num_known: Tensor
    new_starts: Tensor
    new_blocks: Tensor


@dataclass(frozen=True)
class DecodeInputs:
    """The inputs of a pass over up to B lanes, in memory of their own.

    token_ids, positions, slots, context_lens: (B,) int32; query_starts: (B + 1,) int32, 0 to B; block_tables: (B,
    max_blocks) int32; block_size: of the pool; scratch_block: a block that no sequence has, where lanes of padding
    write.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    query_starts: Tensor
    block_tables: Tensor
    block_size: int
    scratch_block: int

    @classmethod
    def empty(
        cls, num_lanes: int, max_blocks: int, *, block_size: int, scratch_block: int, device: torch.device
    ) -> DecodeInputs:
        """Inputs of lanes of padding."""
        lanes = torch.arange(num_lanes, dtype=torch.int32, device=device)
        tables = torch.zeros((num_lanes, max_blocks), dtype=torch.int32, device=device)
        tables[:, 0] = scratch_block
        return cls(
            token_ids=torch.zeros_like(lanes),
            positions=torch.zeros_like(lanes),
            slots=scratch_block * block_size + lanes % block_size,
            context_lens=torch.ones_like(lanes),
            query_starts=torch.arange(num_lanes + 1, dtype=torch.int32, device=device),
            block_tables=tables,
            block_size=block_size,
            scratch_block=scratch_block,
        )

    def batch(self, num_lanes: int) -> AttentionBatch:
        """The first lanes as a pass; views."""
        return AttentionBatch(
            positions=self.positions[:num_lanes],
            slots=self.slots[:num_lanes],
            query_starts=self.query_starts[: num_lanes + 1],
            context_lens=self.context_lens[:num_lanes],
            block_tables=self.block_tables[:num_lanes],
            max_queries=1,
        )


def advance_decode(state: DecodeState, columns: DecodeColumns, inputs: DecodeInputs) -> None:
    """The oracle of `Backend.advance_decode`: lane by lane, in plain torch."""
    size, starts = inputs.block_size, columns.new_starts.tolist()
    lanes = zip(*(column.tolist() for column in (columns.rows, columns.positions, columns.token_ids)), strict=True)
    for lane, (row, position, token_id) in enumerate(lanes):
        table = inputs.block_tables[lane]
        if row == PADDING:
            inputs.token_ids[lane] = inputs.positions[lane] = 0
            inputs.context_lens[lane] = 1
            inputs.slots[lane] = inputs.scratch_block * size + lane % size
            table[0] = inputs.scratch_block
            continue
        known, count = int(columns.num_known[lane]), starts[lane + 1] - starts[lane]
        state.block_tables[row, known : known + count] = columns.new_blocks[starts[lane] : starts[lane + 1]]
        table[: known + count] = state.block_tables[row, : known + count]
        inputs.token_ids[lane] = state.last_tokens[row] if token_id == FROM_STATE else token_id
        inputs.positions[lane] = position
        inputs.context_lens[lane] = position + 1
        inputs.slots[lane] = table[position // size] * size + position % size
