"""e4m3 linear layers in Triton against the oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton import linear_fp8
from octavo_kernels.triton.linear_fp8 import Fp8Linear
from tests.kernels.cases import DTYPES, TOLERANCES, normal
from tests.kernels.triton.cases import HOPPER_TRAITS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("out_features", "in_features", "rows"), [(48, 128, 1), (100, 33, 7), (1, 1, 3), (70, 577, 20), (33, 130, 70)]
)
def test_matches_reference(reference, dtype, out_features, in_features, rows):
    weight = normal(out_features, in_features, dtype=torch.float32, seed=1, scale=0.05)
    bias = normal(out_features, dtype=torch.float32, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    layer, oracle = Fp8Linear(weight, bias, dtype), reference.fp8_linear(weight, bias, dtype=dtype)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(layer(x, residual), oracle(x, residual), atol=atol, rtol=rtol)
    wide = Fp8Linear(weight, None, dtype, torch.float32)(x)
    expected = reference.fp8_linear(weight, dtype=dtype, out_dtype=torch.float32)(x)
    torch.testing.assert_close(wide, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("parts", [1, 3])
def test_e4m3_as_hopper_multiplies_it(reference, parts, monkeypatch):
    weight, x = normal(50, 900, dtype=torch.float32, seed=1, scale=0.05), normal(5, 900, dtype=torch.float16, seed=2)
    bias = normal(50, dtype=torch.float32, seed=3)
    monkeypatch.setattr(linear_fp8, "device_traits", lambda _: HOPPER_TRAITS)
    monkeypatch.setattr(linear_fp8, "num_parts", lambda *_: parts)
    out = Fp8Linear(weight, bias, torch.float16, torch.float32)(x)
    expected = reference.fp8_linear(weight, bias, dtype=torch.float16, out_dtype=torch.float32)(x)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_parts_add_up(monkeypatch):
    layer = Fp8Linear(normal(50, 900, dtype=torch.float32, seed=1), None, torch.float16, torch.float32)
    x = normal(5, 900, dtype=torch.float16, seed=2)
    whole = layer(x)
    monkeypatch.setattr(linear_fp8, "num_parts", lambda *_: 3)
    torch.testing.assert_close(layer(x), whole, atol=2e-4, rtol=1e-5)


def test_what_is_not_finite_spoils_its_row_alone():
    layer = Fp8Linear(normal(20, 200, dtype=torch.float32, seed=1), None, torch.float32)
    x = normal(4, 200, dtype=torch.float32, seed=2)
    good = layer(x)
    x[2, 7] = float("nan")
    out = layer(x)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], good[[0, 1, 3]])


def test_strided_weights_and_no_rows():
    weight, x = normal(64, 4, dtype=torch.float32, seed=1).T, normal(2, 64, dtype=torch.float32, seed=2)
    layer = Fp8Linear(weight, None, torch.float32)
    assert torch.equal(layer(x), Fp8Linear(weight.contiguous(), None, torch.float32)(x))
    assert layer(x[:0]).shape == (0, 4)


def test_refuses():
    with pytest.raises(InvalidArgumentError, match=r"dtype is torch\.float64"):
        Fp8Linear(torch.ones(4, 64), None, torch.float64)
    with pytest.raises(InvalidArgumentError, match="bias has shape"):
        Fp8Linear(torch.ones(4, 64), torch.ones(3), torch.float32)
    layer = Fp8Linear(torch.ones(4, 64), None, torch.float16, torch.float32)
    with pytest.raises(InvalidArgumentError, match="x has shape"):
        layer(torch.ones(2, 64))
    with pytest.raises(InvalidArgumentError, match="takes no residual"):
        layer(torch.ones(2, 64).half(), torch.ones(2, 4).half())
