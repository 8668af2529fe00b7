"""4-bit linear layers with 8-bit activations in Triton: the arithmetic of `Backend.int4_linear`, step by step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.reference_linear import quantize_rows
from octavo_kernels.triton.linear_w4a8 import W4A8Linear
from tests.kernels.cases import DTYPES, normal


def quantized(out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out_features + in_features)
    integers = torch.randint(0, 16, (out_features, in_features), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(out_features, -(-in_features // 32), generator=generator) * 0.02 + 0.001).half()
    return integers, scales, (scales * -7.3).half()


def oracle(x, weight, bias, residual):
    """Integers and products of two fp32 numbers are exact in float64."""
    integers, scales, minimums = weight
    stored, x_scales = quantize_rows(x.float(), 32)
    sums = x_scales * stored.sum(dim=-1).float()
    out = torch.zeros(x.shape[0], integers.shape[0])
    for group, columns in enumerate(integers.double().split(32, dim=1)):
        dots = (stored[:, group, : columns.shape[1]] @ columns.T).float() * scales[:, group].float()
        out = (x_scales[:, group, None].double() * dots.double() + out.double()).float()
        out = (sums[:, group, None].double() * minimums[:, group].double() + out.double()).float()
    return (out + bias + residual.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("out_features", "in_features", "rows"), [(48, 64, 1), (100, 33, 7), (1, 1, 3), (70, 300, 20), (33, 96, 70)]
)
def test_matches_the_stated_arithmetic(dtype, out_features, in_features, rows):
    weight = quantized(out_features, in_features)
    bias = normal(out_features, dtype=torch.float32, seed=2)
    x, residual = normal(rows, in_features, dtype=dtype, seed=3), normal(rows, out_features, dtype=dtype, seed=4)
    out = W4A8Linear(*weight, bias, dtype)(x, residual)
    # The interpreter rounds twice where a GPU has a fused multiply-add, and cuts to bf16 where it rounds.
    digits = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out, oracle(x, weight, bias, residual), atol=2e-6, rtol=digits)


def test_a_row_has_its_own_bits():
    layer = W4A8Linear(*quantized(50, 99), None, torch.float16)
    x = normal(70, 99, dtype=torch.float16, seed=2)
    whole = layer(x)
    for rows in (1, 17, 33):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows


def test_what_is_not_finite_spoils_its_row_alone():
    layer = W4A8Linear(*quantized(20, 100), None, torch.float32)
    x = normal(4, 100, dtype=torch.float32, seed=2)
    good = layer(x)
    x[2, 7] = float("nan")
    out = layer(x)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], good[[0, 1, 3]])


def test_refuses():
    integers, scales, minimums = quantized(4, 64)
    with pytest.raises(InvalidArgumentError, match="scales have shape"):
        W4A8Linear(integers, scales[:, :1], minimums, None, torch.float32)
    with pytest.raises(InvalidArgumentError, match="x has shape"):
        W4A8Linear(integers, scales, minimums, None, torch.float32)(torch.ones(2, 63))
