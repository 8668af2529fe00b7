"""The greatest result of a linear layer: what the sampler finds in the results themselves."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from octavo_kernels.int4 import quantize_int4
from tests.kernels.cases import ISAS, normal

KINDS = ("float32", "bfloat16", "float16", "int8", "int8 in groups", "int4")
ROWS = (1, 2, 3, 7, 8, 9, 40, 150)


def make_layer(backend, kind, weight, bias=None):
    """A layer with results of fp32."""
    if kind.startswith("int8"):
        group = 64 if kind.endswith("groups") else None
        return backend.int8_linear(weight, bias, dtype=torch.bfloat16, group=group, out_dtype=torch.float32)
    if kind == "int4":
        return backend.int4_linear(quantize_int4(weight), bias, dtype=torch.bfloat16, out_dtype=torch.float32)
    dtype = getattr(torch, kind)
    return backend.linear(weight.to(dtype), None if bias is None else bias.to(dtype), out_dtype=torch.float32)


def inputs(kind, *shape, seed=3):
    return normal(*shape, dtype=torch.bfloat16 if kind.startswith("int") else getattr(torch, kind), seed=seed)


def greatest(reference, results):
    """By the oracle of sampling."""
    zeros = torch.zeros(len(results), dtype=torch.int64)
    return reference.gumbel_argmax(results, zeros.float(), zeros, zeros)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_features", [1, 15, 47, 48, 49, 100, 2000])
def test_is_what_sampling_finds(native, reference, isa, kind, out_features):
    backend = native(isa)
    weight = normal(out_features, 130, dtype=torch.float32, seed=1, scale=0.1)
    # Results far below the zeros of columns that do not exist.
    for bias in (None, torch.full((out_features,), -50.0)):
        layer = make_layer(backend, kind, weight, bias)
        for rows in ROWS:
            x = inputs(kind, rows, 130)
            found = backend.linear_argmax(layer, x)
            assert found.dtype is torch.int64
            assert torch.equal(found, greatest(reference, layer(x)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_lowest_of_equals_wins(native, reference, isa, kind):
    """Every column is there 50 times, in panels that either thread may come to first."""
    backend = native(isa)
    layer = make_layer(backend, kind, normal(60, 64, dtype=torch.float32, seed=1).repeat(50, 1))
    for rows in ROWS:
        x = inputs(kind, rows, 64)
        found = backend.linear_argmax(layer, x)
        assert int(found.max()) < 60
        assert torch.equal(found, greatest(reference, layer(x)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_finite_have_none(native, reference, isa, kind):
    backend = native(isa)
    layer = make_layer(backend, kind, normal(300, 64, dtype=torch.float32, seed=1))
    x = inputs(kind, 20, 64)
    x[3, 7], x[12, 63], x[19, 0] = float("nan"), float("inf"), float("-inf")
    found = backend.linear_argmax(layer, x)
    assert [row for row, column in enumerate(found.tolist()) if column == -1] == [3, 12, 19]
    assert torch.equal(found, greatest(reference, layer(x)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("place", [0, 17, 47, 48, 144, 299])
@pytest.mark.parametrize(("value", "is_found"), [("nan", False), ("inf", False), ("-inf", True)])
def test_a_single_result_that_is_not_finite(native, isa, place, value, is_found):
    bias = torch.zeros(300)
    bias[place] = float(value)
    layer = native(isa).linear(normal(300, 64, dtype=torch.float32, seed=1), bias)
    found = native(isa).linear_argmax(layer, inputs("float32", 9, 64))
    assert bool((found >= 0).all()) is is_found
    assert bool((found < 0).all()) is not is_found
    assert not (found == place).any()


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_but_minus_infinity(native, isa):
    layer = native(isa).linear(normal(100, 64, dtype=torch.float32, seed=1), torch.full((100,), float("-inf")))
    assert native(isa).linear_argmax(layer, inputs("float32", 5, 64)).tolist() == [-1] * 5


def test_the_oracle_itself(reference):
    layer = reference.linear(torch.eye(3), torch.tensor([0.0, 1.0, 1.0]))
    x = torch.tensor([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 1.0], [float("nan"), 0.0, 0.0]])
    assert reference.linear_argmax(layer, x).tolist() == [1, 0, 2, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs(native, kind):
    layer = make_layer(native(), kind, normal(300, 64, dtype=torch.float32, seed=1))
    x = inputs(kind, 9, 100)
    assert torch.equal(native().linear_argmax(layer, x[:, :64]), native().linear_argmax(layer, x[:, :64].clone()))


def test_no_rows(native):
    assert native().linear_argmax(native().linear(torch.eye(3)), torch.zeros(0, 3)).shape == (0,)


def test_what_is_refused(native, reference):
    rounded = native().linear(torch.eye(3, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgumentError, match="what is compared must be float32"):
        native().linear_argmax(rounded, torch.zeros(1, 3, dtype=torch.bfloat16))
    rounded = reference.linear(torch.eye(3, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgumentError, match="what is compared must be float32"):
        reference.linear_argmax(rounded, torch.zeros(1, 3, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgumentError, match="layer is a ReferenceLinear"):
        native().linear_argmax(reference.linear(torch.eye(3)), torch.zeros(1, 3))
    with pytest.raises(InvalidArgumentError, match="x has shape"):
        native().linear_argmax(native().linear(torch.eye(3)), torch.zeros(1, 4))
