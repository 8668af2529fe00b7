"""4-bit linear layers in Triton against their dequantized weights in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import Int4Weight, InvalidArgumentError
from octavo_kernels.triton import linear_w4a16
from octavo_kernels.triton.linear_w4a16 import W4A16Linear
from tests.kernels.cases import DTYPES, TOLERANCES, normal


def quantized(out_features: int, in_features: int) -> Int4Weight:
    generator = torch.Generator().manual_seed(out_features + in_features)
    integers = torch.randint(0, 16, (out_features, in_features), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(out_features, -(-in_features // 32), generator=generator) * 0.02 + 0.001).half()
    return Int4Weight(integers, scales, (scales * -7.3).half())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("out_features", "in_features", "rows"),
    [(48, 64, 1), (100, 33, 7), (1, 1, 3), (70, 200, 20), (50, 577, 13), (33, 96, 70)],
)
def test_matches_dequantized_weights(reference, dtype, out_features, in_features, rows):
    weight = quantized(out_features, in_features)
    bias = normal(out_features, dtype=torch.float32, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    values = weight.dequantize().to(dtype)
    atol, rtol = TOLERANCES[dtype]
    out, expected = W4A16Linear(weight, bias, dtype)(x, residual), reference.linear(values, bias)(x, residual)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)
    wide = W4A16Linear(weight, None, dtype, torch.float32)(x)
    expected = reference.linear(values, out_dtype=torch.float32)(x)
    torch.testing.assert_close(wide, expected, atol=atol, rtol=rtol)


def test_parts_add_up(monkeypatch):
    layer = W4A16Linear(quantized(50, 900), None, torch.float16, torch.float32)
    x = normal(5, 900, dtype=torch.float16, seed=2)
    whole = layer(x)
    monkeypatch.setattr(linear_w4a16, "num_parts", lambda *_: 4)
    torch.testing.assert_close(layer(x), whole, atol=1e-5, rtol=1e-5)


def test_strided_inputs_and_none():
    layer = W4A16Linear(quantized(20, 80), None, torch.float32)
    wide = normal(3, 200, dtype=torch.float32, seed=1)
    assert torch.equal(layer(wide[:, 40:120]), layer(wide[:, 40:120].contiguous()))
    assert layer(wide[:0, :80]).shape == (0, 20)


def test_refuses():
    weight = quantized(4, 64)
    with pytest.raises(InvalidArgumentError, match="bias has shape"):
        W4A16Linear(weight, torch.ones(3), torch.float32)
    with pytest.raises(InvalidArgumentError, match=r"dtype is torch\.float64"):
        W4A16Linear(weight, None, torch.float64)
    with pytest.raises(InvalidArgumentError, match="x has shape"):
        W4A16Linear(weight, None, torch.float32)(torch.ones(2, 63))
