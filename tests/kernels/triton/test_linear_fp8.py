"""e4m3 linear layers in Triton against the same stored numbers in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton import linear_fp8
from octavo_kernels.triton.linear_fp8 import Fp8Linear, quantize_fp8
from tests.kernels.cases import DTYPES, TOLERANCES, normal


def oracle(x, weight, scales, bias, residual):
    """Activations quantized by the rules of `quantize_rows`, products in fp32."""
    magnitude = x.float().abs().amax(dim=1, keepdim=True)
    largest = torch.full_like(magnitude, 448.0)
    stored = (x.float() * (largest / magnitude)).to(torch.float8_e4m3fn).float()
    out = stored @ weight.float().T * (magnitude / largest) * scales
    return (out + bias + residual.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("out_features", "in_features", "rows"), [(48, 128, 1), (100, 33, 7), (1, 1, 3), (70, 577, 20), (33, 130, 70)]
)
def test_matches_plain_torch(dtype, out_features, in_features, rows):
    weight, scales = quantize_fp8(normal(out_features, in_features, dtype=torch.float32, seed=1, scale=0.05))
    bias = normal(out_features, dtype=torch.float32, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    out = Fp8Linear(weight, scales, bias, dtype)(x, residual)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out, oracle(x, weight, scales, bias, residual), atol=atol, rtol=rtol)


def test_parts_add_up(monkeypatch):
    weight, scales = quantize_fp8(normal(50, 900, dtype=torch.float32, seed=1))
    layer = Fp8Linear(weight, scales, None, torch.float32)
    x = normal(5, 900, dtype=torch.float32, seed=2)
    whole = layer(x)
    monkeypatch.setattr(linear_fp8, "num_parts", lambda *_: 3)
    torch.testing.assert_close(layer(x), whole, atol=2e-4, rtol=1e-5)


def test_weights_are_scaled_to_the_largest_number():
    weight, scales = quantize_fp8(torch.tensor([[448.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1.0, -7.0, 3.5]]))
    assert scales.tolist() == pytest.approx([1.0, 0.0, 7 / 448])
    assert weight.float().tolist() == [[448.0, -2.0, 0.5], [0.0, 0.0, 0.0], [64.0, -448.0, 224.0]]


def test_what_is_not_finite_spoils_its_row_alone():
    weight, scales = quantize_fp8(normal(20, 200, dtype=torch.float32, seed=1))
    layer = Fp8Linear(weight, scales, None, torch.float32)
    x = normal(4, 200, dtype=torch.float32, seed=2)
    good = layer(x)
    x[2, 7] = float("nan")
    out = layer(x)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], good[[0, 1, 3]])


def test_refuses():
    weight, scales = quantize_fp8(torch.ones(4, 64))
    with pytest.raises(InvalidArgumentError, match=r"weight has dtype torch\.float32"):
        Fp8Linear(torch.ones(4, 64), scales, None, torch.float32)
    with pytest.raises(InvalidArgumentError, match="scales have shape"):
        Fp8Linear(weight, scales[:3], None, torch.float32)
    with pytest.raises(InvalidArgumentError, match="x has shape"):
        Fp8Linear(weight, scales, None, torch.float16)(torch.ones(2, 64))
