"""The gated activation in Triton against the oracle and written-down values."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton.silu_mul import silu_mul
from tests.kernels.cases import DTYPES, TOLERANCES, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 15), (5, 1100), (0, 4), (4, 0)])
def test_matches_reference(reference, dtype, rows, n):
    gate_up = normal(rows, 2 * n, dtype=dtype, seed=1, scale=4)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), atol=atol, rtol=rtol)


def test_strided_rows(reference):
    wide = normal(3, 70, dtype=torch.float32, seed=1)
    torch.testing.assert_close(silu_mul(wide[:, 3:63]), reference.silu_mul(wide[:, 3:63]))


def test_at_the_ends():
    gate = torch.tensor([-200.0, -100.0, -20.0, 0.0, 20.0, 200.0, float("nan"), float("inf")])
    out = silu_mul(torch.cat((gate, torch.ones(8)))[None])[0]
    expected = [0.0, 0.0, -20 / (1 + 485165195.41), 0.0, 20.0, 200.0, float("nan"), float("inf")]
    torch.testing.assert_close(out, torch.tensor(expected), equal_nan=True)


def test_refuses():
    for wrong in (torch.ones(2, 3), torch.ones(2, 2, 2), torch.ones(4, 2).T):
        with pytest.raises(InvalidArgumentError, match="gate_up has shape"):
            silu_mul(wrong)
