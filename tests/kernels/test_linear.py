"""Linear layers: against the oracle, and bit for bit whatever rows stand beside a row."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from octavo_kernels.int4 import quantize_int4
from tests.kernels.cases import DTYPES, ISAS, TOLERANCES, normal

SHAPES = [(48, 64, 1), (100, 33, 7), (1, 1, 3), (577, 576, 20), (50, 577, 13), (192, 100, 150)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features", "rows"), SHAPES)
def test_matches_reference(native, reference, isa, dtype, out_features, in_features, rows):
    backend = native(isa)
    weight = normal(out_features, in_features, dtype=dtype, seed=1, scale=in_features**-0.5)
    bias = normal(out_features, dtype=dtype, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    atol, rtol = TOLERANCES[dtype]
    for layer, oracle in (
        (backend.linear(weight), reference.linear(weight)),
        (backend.linear(weight, bias), reference.linear(weight, bias)),
    ):
        torch.testing.assert_close(layer(x), oracle(x), atol=atol, rtol=rtol)
        torch.testing.assert_close(layer(x, residual), oracle(x, residual), atol=atol, rtol=rtol)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_in_fp32(native, reference, isa, dtype, kind):
    """What would be rounded to 16 bits, before it is."""
    weight, bias = normal(100, 64, dtype=dtype, seed=1), normal(100, dtype=dtype, seed=2)
    x = normal(11, 64, dtype=dtype, seed=3)

    def layer(backend, out_dtype):
        if kind == "int8":
            return backend.int8_linear(weight, bias, dtype=dtype, out_dtype=out_dtype)
        if kind == "int4":
            return backend.int4_linear(quantize_int4(weight.float()), bias, dtype=dtype, out_dtype=out_dtype)
        return backend.linear(weight, bias, out_dtype=out_dtype)

    out = layer(native(isa), torch.float32)(x)
    assert out.dtype is torch.float32
    assert torch.equal(out.to(dtype), layer(native(isa), None)(x))
    torch.testing.assert_close(out, layer(reference, torch.float32)(x), atol=1e-3, rtol=1e-3)
    for backend in (native(isa), reference):
        with pytest.raises(InvalidArgumentError, match="residual"):
            layer(backend, torch.float32)(x, torch.zeros(11, 100, dtype=dtype))
        with pytest.raises(InvalidArgumentError, match="out_dtype"):
            layer(backend, torch.float16 if dtype is torch.bfloat16 else torch.bfloat16)


def test_written_down(native):
    layer = native().linear(torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 0.5]]), torch.tensor([10.0, 20.0]))
    out = layer(torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[100.0, 200.0]]))
    assert out.tolist() == [[116.0, 219.5]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_own_bits(native, isa, dtype):
    layer = native(isa).linear(normal(150, 99, dtype=dtype, seed=1))
    x = normal(513, 99, dtype=dtype, seed=2)
    # Every row once as the only row.
    alone = torch.cat([layer(x[i : i + 1]) for i in range(513)])
    for rows in [*range(1, 71), 513]:
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_counts_agree(native, dtype):
    weight, x = normal(577, 576, dtype=dtype, seed=1), normal(300, 576, dtype=dtype, seed=2)
    results = [native(num_threads=n).linear(weight)(x) for n in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_strided_inputs(native):
    backend = native()
    wide = normal(9, 200, dtype=torch.float32, seed=1)
    layer = backend.linear(normal(60, 80, dtype=torch.float32, seed=2))
    residual = normal(9, 300, dtype=torch.float32, seed=3)
    expected = layer(wide[:, 40:120].contiguous(), residual[:, 10:70].contiguous())
    assert torch.equal(layer(wide[:, 40:120], residual[:, 10:70]), expected)
    transposed = normal(200, 60, dtype=torch.float32, seed=4)[:, 5:25]
    assert torch.equal(backend.linear(transposed)(wide[:, :20]), backend.linear(transposed.contiguous())(wide[:, :20]))


def test_no_rows(native):
    assert native().linear(torch.ones(5, 4))(torch.ones(0, 4)).shape == (0, 5)


def test_refuses_what_it_cannot_take(native):
    backend = native()
    layer = backend.linear(torch.ones(5, 4))
    with pytest.raises(InvalidArgumentError, match=r"x has shape \(2, 3\)"):
        layer(torch.ones(2, 3))
    with pytest.raises(InvalidArgumentError, match="bfloat16"):
        layer(torch.ones(2, 4, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgumentError, match="residual"):
        layer(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(InvalidArgumentError, match="float64"):
        backend.linear(torch.ones(5, 4, dtype=torch.float64))
    with pytest.raises(InvalidArgumentError, match="bias"):
        backend.linear(torch.ones(5, 4), torch.ones(4))
