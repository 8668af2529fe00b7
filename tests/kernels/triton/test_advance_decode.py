from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from octavo_kernels.decode_state import FROM_STATE, PADDING, DecodeColumns, DecodeInputs, DecodeState
from octavo_kernels.decode_state import advance_decode as oracle
from octavo_kernels.triton.advance_decode import advance_decode

CPU = torch.device("cpu")


def drawn(lanes: int, padding: int, block_size: int, max_blocks: int, seed: int) -> tuple[DecodeState, DecodeColumns]:
    """A step over random rows; some sequences are new, some bring a block, most bring none."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    num_rows = lanes + 5
    state = DecodeState(ints(0, 1000, num_rows), ints(0, 500, num_rows, max_blocks))
    rows = torch.randperm(num_rows, generator=generator)[:lanes].int()
    positions = ints(0, max_blocks * block_size, lanes)
    needed = positions // block_size + 1
    known = torch.minimum(ints(0, max_blocks, lanes), needed)
    known[::3] = needed[::3]
    counts = (needed - known).tolist()
    if padding:
        rows[-padding:], counts[-padding:] = PADDING, [0] * padding
    tokens = ints(0, 1000, lanes)
    tokens[::2] = FROM_STATE
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    columns = DecodeColumns(rows, positions, tokens, known, starts, ints(500, 900, max(sum(counts), 1)))
    return state, columns


def copied(state: DecodeState) -> DecodeState:
    return DecodeState(state.last_tokens.clone(), state.block_tables.clone())


@pytest.mark.parametrize(
    ("lanes", "padding", "block_size", "max_blocks"),
    [(1, 0, 16, 1), (2, 1, 8, 3), (8, 3, 16, 40), (4, 0, 32, 300), (3, 3, 16, 5), (9, 2, 8, 257)],
)
def test_inputs_and_state_equal_the_oracles(lanes: int, padding: int, block_size: int, max_blocks: int) -> None:
    state, columns = drawn(lanes, padding, block_size, max_blocks, seed=lanes)
    expected_state = copied(state)
    inputs, expected = (
        DecodeInputs.empty(lanes + 2, max_blocks, block_size=block_size, scratch_block=1000, device=CPU)
        for _ in range(2)
    )
    advance_decode(state, columns, inputs)
    oracle(expected_state, columns, expected)
    torch.testing.assert_close(state.block_tables, expected_state.block_tables, rtol=0, atol=0)
    for name in ("token_ids", "positions", "slots", "context_lens", "block_tables"):
        torch.testing.assert_close(getattr(inputs, name), getattr(expected, name), rtol=0, atol=0, msg=name)


def test_what_does_not_fit_is_refused() -> None:
    state, columns = drawn(2, 0, 16, 4, seed=0)
    inputs = DecodeInputs.empty(2, 4, block_size=16, scratch_block=9, device=CPU)
    with pytest.raises(InvalidArgumentError, match="positions has shape"):
        advance_decode(state, dataclasses.replace(columns, positions=columns.positions.long()), inputs)
    small = DecodeInputs.empty(1, 4, block_size=16, scratch_block=9, device=CPU)
    with pytest.raises(InvalidArgumentError, match="at least 2 lanes are needed"):
        advance_decode(state, columns, small)
