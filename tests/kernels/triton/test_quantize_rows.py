"""Quantization of activations in Triton: the oracle's integers and scales, and torch's e4m3."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels.reference_linear import quantize_rows as reference_quantize_rows
from octavo_kernels.triton.quantize_rows import quantize_rows
from tests.kernels.cases import DTYPES, normal


def rows_to_quantize(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary rows, tiny ones, zeros, a NaN and an infinity."""
    x = normal(7, n, dtype=dtype, seed=n)
    x[1] *= 1e-7 if dtype is torch.float16 else 1e-35
    x[2] = 0
    x[3, n // 2], x[4, 0] = float("nan"), float("-inf")
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "group"), [(577, 64), (300, 128), (577, 640), (2500, 2560), (1, 128)])
def test_integers_are_the_oracle_s(dtype, n, group):
    x, groups = rows_to_quantize(n, dtype), -(-n // group)
    stored, scales = quantize_rows(x, group, groups, torch.int8)
    integers, expected = reference_quantize_rows(x.float(), group)
    assert torch.equal(stored.double(), integers.flatten(1))
    torch.testing.assert_close(scales, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("n", [1, 577, 2500])
def test_e4m3_is_torch_s(n):
    x = rows_to_quantize(n, torch.float32)
    width = -(-n // 128) * 128
    stored, scales = quantize_rows(x, width, 1, torch.float8_e4m3fn)
    magnitude = x.abs().amax(dim=1, keepdim=True)
    good = magnitude.isfinite() & (magnitude >= 2.0**-100)
    largest = torch.full_like(magnitude, 448.0)
    expected = torch.where(good, x * (largest / magnitude), 0.0).to(torch.float8_e4m3fn)
    assert torch.equal(stored[:, :n].float(), expected.float())
    assert not stored[:, n:].float().count_nonzero()
    wanted = torch.where(good, magnitude / largest, torch.where(magnitude < 1, 0.0, float("nan")))
    torch.testing.assert_close(scales, wanted, atol=0, rtol=0, equal_nan=True)


def test_strided_rows_and_none():
    wide = normal(3, 200, dtype=torch.float32, seed=1)
    one, other = (quantize_rows(x, 64, 2, torch.int8) for x in (wide[:, 30:130], wide[:, 30:130].contiguous()))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert quantize_rows(wide[:0], 256, 1, torch.int8)[0].shape == (0, 256)
