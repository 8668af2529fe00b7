"""8-bit linear layers in Triton: the oracle's arithmetic, whatever the tiles, the parts and the rows beside a row."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton import linear_int8
from octavo_kernels.triton.linear_int8 import Int8Linear
from tests.kernels.cases import DTYPES, normal

# (out_features, in_features, rows, group)
SHAPES = [
    (48, 64, 1, None),
    (100, 33, 7, None),
    (1, 1, 3, None),
    (70, 577, 20, None),
    (50, 577, 13, 64),
    (70, 100, 40, 64),
    (49, 300, 8, 128),
    (20, 50, 5, 192),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features", "rows", "group"), SHAPES)
def test_matches_reference(reference, dtype, out_features, in_features, rows, group):
    weight = normal(out_features, in_features, dtype=torch.float32, seed=1, scale=in_features**-0.5)
    bias = normal(out_features, dtype=torch.float32, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    layer = Int8Linear(weight, bias, dtype, group)
    oracle = reference.int8_linear(weight, bias, dtype=dtype, group=group)
    if dtype is torch.bfloat16:  # the interpreter cuts where a GPU rounds
        torch.testing.assert_close(layer(x, residual), oracle(x, residual), atol=1e-6, rtol=2**-7)
    elif group is None or in_features <= group:
        assert torch.equal(Int8Linear(weight, None, dtype, group)(x), reference.int8_linear(
            weight, dtype=dtype, group=group)(x))  # fmt: skip
        assert torch.equal(layer(x, residual), oracle(x, residual))
    else:  # the interpreter rounds twice where a GPU has a fused multiply-add
        digits = {torch.float32: 3e-7, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(layer(x, residual), oracle(x, residual), atol=1e-6, rtol=digits)


@pytest.mark.parametrize("group", [None, 64])
def test_a_row_has_its_own_bits(group):
    layer = Int8Linear(normal(50, 99, dtype=torch.float32, seed=1), None, torch.float16, group)
    x = normal(70, 99, dtype=torch.float16, seed=2)
    whole = layer(x)
    for rows in (1, 17, 33):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows


def test_parts_give_the_same_bits(monkeypatch):
    layer = Int8Linear(
        normal(50, 900, dtype=torch.float32, seed=1), normal(50, dtype=torch.float32), torch.float16, None
    )
    x, residual = normal(5, 900, dtype=torch.float16, seed=2), normal(5, 50, dtype=torch.float16, seed=3)
    results = []
    for parts in (1, 3, 8):
        monkeypatch.setattr(linear_int8, "num_parts", lambda *_, parts=parts: parts)
        results.append(layer(x, residual))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_what_is_not_finite_spoils_its_row_alone():
    for group in (None, 64):
        layer = Int8Linear(normal(20, 200, dtype=torch.float32, seed=1), None, torch.float32, group)
        x = normal(5, 200, dtype=torch.float32, seed=2)
        good = layer(x)
        x[3, 150] = float("inf")
        out = layer(x)
        assert out[3].isnan().all()
        assert torch.equal(out[[0, 1, 2, 4]], good[[0, 1, 2, 4]])


def test_strided_inputs_and_none():
    layer = Int8Linear(normal(20, 80, dtype=torch.float32, seed=2), None, torch.float32, None)
    wide, residual = normal(3, 200, dtype=torch.float32, seed=1), normal(3, 90, dtype=torch.float32, seed=3)
    expected = layer(wide[:, 40:120].contiguous(), residual[:, 10:30].contiguous())
    assert torch.equal(layer(wide[:, 40:120], residual[:, 10:30]), expected)
    assert layer(wide[:0, :80]).shape == (0, 20)


def test_refuses():
    with pytest.raises(InvalidArgumentError, match="group is 32"):
        Int8Linear(torch.ones(4, 64), None, torch.float32, 32)
    with pytest.raises(InvalidArgumentError, match="bias has shape"):
        Int8Linear(torch.ones(4, 64), torch.ones(5), torch.float32, None)
    layer = Int8Linear(torch.ones(4, 64), None, torch.float32, None)
    with pytest.raises(InvalidArgumentError, match="x has shape"):
        layer(torch.ones(2, 63))
    with pytest.raises(InvalidArgumentError, match="residual has shape"):
        layer(torch.ones(2, 64), torch.ones(2, 5))
