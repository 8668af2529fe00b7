from __future__ import annotations

import torch

from octavo_kernels.decode_state import FROM_STATE, PADDING, DecodeColumns, DecodeInputs, DecodeState
from octavo_kernels.reference import ReferenceBackend

BLOCK, SCRATCH = 8, 30


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(lanes: int) -> DecodeInputs:
    return DecodeInputs.empty(lanes, 4, block_size=BLOCK, scratch_block=SCRATCH, device=torch.device("cpu"))


def test_inputs_begin_as_padding() -> None:
    batch = inputs(3).batch(2)
    assert batch.positions.tolist() == [0, 0]
    assert batch.slots.tolist() == [240, 241]
    assert batch.query_starts.tolist() == [0, 1, 2]
    assert batch.context_lens.tolist() == [1, 1]
    assert batch.block_tables[:, 0].tolist() == [SCRATCH, SCRATCH]


def test_a_step_takes_tokens_and_blocks_from_the_plan_and_from_the_state(reference: ReferenceBackend) -> None:
    state = DecodeState(column(70, 71, 72), torch.tensor([[1, 2, 9, 9], [3, 9, 9, 9], [4, 5, 9, 9]], dtype=torch.int32))
    step = inputs(4)
    reference.advance_decode(
        state,
        DecodeColumns(
            rows=column(2, 0, 1, PADDING),
            positions=column(16, 10, 3, 0),
            token_ids=column(FROM_STATE, 50, FROM_STATE, 0),
            num_known=column(2, 2, 0, 0),
            new_starts=column(0, 1, 1, 3, 3),
            new_blocks=column(6, 7, 8),
        ),
        step,
    )
    assert step.token_ids.tolist() == [72, 50, 71, 0]
    assert step.positions.tolist() == [16, 10, 3, 0]
    assert step.context_lens.tolist() == [17, 11, 4, 1]
    assert step.slots.tolist() == [48, 18, 59, 243]
    assert step.block_tables[0, :3].tolist() == [4, 5, 6]
    assert step.block_tables[1, :2].tolist() == [1, 2]
    assert step.block_tables[2, :2].tolist() == [7, 8]
    assert step.block_tables[3, 0] == SCRATCH
    assert state.block_tables.tolist() == [[1, 2, 9, 9], [7, 8, 9, 9], [4, 5, 6, 9]]


def test_a_lane_that_held_a_sequence_becomes_padding(reference: ReferenceBackend) -> None:
    state = DecodeState(column(70), torch.zeros((1, 4), dtype=torch.int32))
    step = inputs(1)
    columns = DecodeColumns(column(0), column(9), column(5), column(0), column(0, 2), column(6, 7))
    reference.advance_decode(state, columns, step)
    assert (step.token_ids.tolist(), step.slots.tolist(), step.context_lens.tolist()) == ([5], [57], [10])
    idle = DecodeColumns(column(PADDING), column(0), column(0), column(0), column(0, 0), column(0))
    reference.advance_decode(state, idle, step)
    assert (step.token_ids.tolist(), step.slots.tolist(), step.context_lens.tolist()) == ([0], [240], [1])
    assert step.block_tables[0, 0] == SCRATCH
