"""The linear layer for few rows in Triton against the oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels.triton import linear_skinny
from octavo_kernels.triton.linear_skinny import SkinnyLinear
from tests.kernels.cases import TOLERANCES, normal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("out_features", "in_features", "rows"), [(48, 128, 1), (100, 33, 7), (1, 1, 3), (70, 577, 20), (33, 256, 64)]
)
def test_matches_reference(reference, dtype, out_features, in_features, rows):
    weight = normal(out_features, in_features, dtype=dtype, seed=1, scale=in_features**-0.5)
    bias = normal(out_features, dtype=dtype, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    oracle = reference.linear(weight, bias)
    atol, rtol = TOLERANCES[dtype]
    layer = SkinnyLinear(weight, bias)
    torch.testing.assert_close(layer(x, residual), oracle(x, residual), atol=atol, rtol=rtol)
    torch.testing.assert_close(layer(x), oracle(x), atol=atol, rtol=rtol)


def test_parts_add_up(monkeypatch):
    layer = SkinnyLinear(normal(50, 900, dtype=torch.float16, seed=1, scale=0.1), None)
    x = normal(5, 1000, dtype=torch.float16, seed=2)[:, 50:950]
    whole = layer(x)
    monkeypatch.setattr(linear_skinny, "num_parts", lambda *_: 3)
    torch.testing.assert_close(layer(x), whole, atol=4e-3, rtol=2e-3)
