"""Rotary positions in Triton against the oracle and written-down values."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton.rotary import rotary
from tests.kernels.cases import DTYPES, TOLERANCES, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (40, 36), (8, 2), (128, 64), (100, 100)])
def test_matches_reference(reference, dtype, head_dim, rotary_dim):
    angles = normal(50, rotary_dim // 2, dtype=torch.float32, seed=1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (5,), generator=torch.Generator().manual_seed(2)).int()
    wide = normal(5, 5 * head_dim + 7, dtype=dtype, seed=3)
    before = wide.clone()
    expected = wide[:, 7:].unflatten(1, (5, head_dim)).clone()
    reference.rotary(expected, positions, cos_sin)
    rotary(wide[:, 7:].unflatten(1, (5, head_dim)), positions, cos_sin)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(wide[:, 7:].unflatten(1, (5, head_dim)), expected, atol=atol, rtol=rtol)
    assert torch.equal(wide[:, :7], before[:, :7])
    untouched = slice(7 + rotary_dim, 7 + head_dim)
    assert torch.equal(wide[:, untouched], before[:, untouched])


def test_turns_pairs_half_a_head_apart():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    # A quarter turn for the pair (0, 2), none for (1, 3).
    rotary(x, torch.tensor([1]).int(), torch.tensor([[9.0] * 4, [0.0, 1.0, 1.0, 0.0]]))
    assert x.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_positions_that_the_table_has_not_leave_their_token_alone():
    x = normal(2, 3, 8, dtype=torch.float32, seed=1)
    before = x.clone()
    rotary(x, torch.tensor([5, -1]).int(), torch.zeros(5, 8))
    assert torch.equal(x, before)


def test_refuses():
    with pytest.raises(InvalidArgumentError, match="rotary_dim is 6"):
        rotary(torch.ones(1, 1, 4), torch.tensor([0]).int(), torch.ones(5, 6))
    with pytest.raises(InvalidArgumentError, match="positions has shape"):
        rotary(torch.ones(1, 1, 4), torch.tensor([0]), torch.ones(5, 4))
    with pytest.raises(InvalidArgumentError, match="x has shape"):
        rotary(torch.ones(1, 4), torch.tensor([0]).int(), torch.ones(5, 4))
