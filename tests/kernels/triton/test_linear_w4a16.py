"""4-bit linear layers in Triton against their dequantized weights in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton import linear_w4a16
from octavo_kernels.triton.linear_w4a16 import W4A16Linear
from tests.kernels.cases import DTYPES, TOLERANCES, normal


def quantized(out_features: int, in_features: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out_features + in_features)
    integers = torch.randint(0, 16, (out_features, in_features), generator=generator, dtype=torch.uint8)
    groups = -(-in_features // group)
    scales = (torch.rand(out_features, groups, generator=generator) * 0.02 + 0.001).half()
    return integers, scales, (scales * -7.3).half()


def dequantized(integers, scales, minimums, group):
    n = integers.shape[1]
    scales, minimums = (numbers.float().repeat_interleave(group, dim=1)[:, :n] for numbers in (scales, minimums))
    return integers.float() * scales + minimums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("out_features", "in_features", "rows", "group"),
    [(48, 64, 1, 32), (100, 33, 7, 32), (1, 1, 3, 128), (70, 200, 20, 64), (50, 577, 13, 128), (33, 96, 70, 32)],
)
def test_matches_dequantized_weights(dtype, out_features, in_features, rows, group):
    parts = quantized(out_features, in_features, group)
    bias = normal(out_features, dtype=torch.float32, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    out = W4A16Linear(*parts, bias, dtype, group=group)(x, residual)
    weight = dequantized(*parts, group).to(dtype).float()
    expected = (x.float() @ weight.T + bias + residual.float()).to(dtype)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


def test_parts_add_up(monkeypatch):
    layer = W4A16Linear(*quantized(50, 900, 64), None, torch.float32, group=64)
    x = normal(5, 900, dtype=torch.float32, seed=2)
    whole = layer(x)
    monkeypatch.setattr(linear_w4a16, "num_parts", lambda *_: 4)
    torch.testing.assert_close(layer(x), whole, atol=1e-5, rtol=1e-5)


def test_strided_inputs_and_none():
    layer = W4A16Linear(*quantized(20, 80, 32), None, torch.float32, group=32)
    wide = normal(3, 200, dtype=torch.float32, seed=1)
    assert torch.equal(layer(wide[:, 40:120]), layer(wide[:, 40:120].contiguous()))
    assert layer(wide[:0, :80]).shape == (0, 20)


def test_refuses():
    integers, scales, minimums = quantized(4, 64, 32)
    with pytest.raises(InvalidArgumentError, match="group is 48"):
        W4A16Linear(integers, scales, minimums, None, torch.float32, group=48)
    with pytest.raises(InvalidArgumentError, match="minimums have shape"):
        W4A16Linear(integers, scales, minimums.float(), None, torch.float32, group=32)
    with pytest.raises(InvalidArgumentError, match="scales have shape"):
        W4A16Linear(integers, scales, minimums, None, torch.float32, group=64)
