"""8-bit linear layers: the oracle's arithmetic to the last digit, and bit for bit whatever rows stand beside a row."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from octavo_kernels.reference_linear import quantize_rows
from tests.kernels.cases import DTYPES, ISAS, normal

# (out_features, in_features, rows, group)
SHAPES = [
    (48, 64, 1, None),
    (100, 33, 7, None),
    (1, 1, 3, None),
    (577, 576, 20, None),
    (50, 577, 13, 64),
    (192, 100, 130, 64),
    (60, 1536, 9, 64),
    (49, 300, 8, 128),
    (20, 50, 5, 64),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features", "rows", "group"), SHAPES)
def test_matches_reference(native, reference, isa, dtype, out_features, in_features, rows, group):
    backend = native(isa)
    weight = normal(out_features, in_features, dtype=torch.float32, seed=1, scale=in_features**-0.5)
    bias = normal(out_features, dtype=torch.float32, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    layer = backend.int8_linear(weight, bias, dtype=dtype, group=group)
    oracle = reference.int8_linear(weight, bias, dtype=dtype, group=group)
    plain = backend.int8_linear(weight, dtype=dtype, group=group)
    plain_oracle = reference.int8_linear(weight, dtype=dtype, group=group)
    # Several groups are added with a fused multiply-add, which the oracle rounds twice and SSE not at all once.
    if group is None or in_features <= group:
        assert torch.equal(plain(x), plain_oracle(x))
        assert torch.equal(layer(x), oracle(x))
        assert torch.equal(layer(x, residual), oracle(x, residual))
    elif isa != "generic" and dtype is torch.float32:
        torch.testing.assert_close(plain(x), plain_oracle(x), atol=3e-7, rtol=1.2e-7)
        torch.testing.assert_close(layer(x, residual), oracle(x, residual), atol=3e-7, rtol=1.2e-7)
    else:
        digits = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(plain(x), plain_oracle(x), atol=1e-6, rtol=digits)


def test_written_down(native):
    # Weights: 127 and -64 steps of 1/127, 127 and 25 steps of 2/127; activations: 127 and 51 steps of 5/127.
    layer = native().int8_linear(torch.tensor([[1.0, -0.5], [0.4, 2.0]]), dtype=torch.float32)
    out = layer(torch.tensor([[5.0, 2.0]]))
    expected = [(127 * 127 - 64 * 51) * 5 / 127 / 127, (25 * 127 + 127 * 51) * 5 / 127 * 2 / 127]
    assert out[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_quantizes_by_the_largest_of_a_group():
    x = torch.cat([torch.full((1, 64), 2.0), torch.full((1, 64), 254.0), torch.zeros(1, 22)], dim=1)
    x[0, 0], x[0, 65] = -1.0, 3.0
    integers, scales = quantize_rows(x, 64)
    assert scales.tolist() == [[2.0 / torch.tensor(127.0), 2.0, 0.0]]
    assert integers[0, :, :3].tolist() == [[-64.0, 127.0, 127.0], [127.0, 2.0, 127.0], [0.0, 0.0, 0.0]]  # ties to even


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [None, 64])
def test_largest_sums_do_not_saturate(native, isa, group):
    for sign in (1.0, -1.0):
        layer = native(isa).int8_linear(torch.full((50, 1536), sign * 0.5), dtype=torch.float32, group=group)
        for value in (3.0, -3.0):
            out = layer(torch.full((9, 1536), value))
            torch.testing.assert_close(out, torch.full((9, 50), sign * value * 768), rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 64])
def test_a_row_has_its_own_bits(native, isa, dtype, group):
    layer = native(isa).int8_linear(normal(150, 99, dtype=torch.float32, seed=1), dtype=dtype, group=group)
    x = normal(513, 99, dtype=dtype, seed=2)
    # Every row once as the only row.
    alone = torch.cat([layer(x[i : i + 1]) for i in range(513)])
    for rows in [*range(1, 131), 513]:
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("group", [None, 64])
def test_thread_counts_agree(native, group):
    weight, x = normal(577, 576, dtype=torch.float32, seed=1), normal(300, 576, dtype=torch.bfloat16, seed=2)
    results = [native(num_threads=n).int8_linear(weight, dtype=x.dtype, group=group)(x) for n in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_agree_on_whole_rows(native, isa):
    weight, x = normal(100, 333, dtype=torch.float32, seed=1), normal(20, 333, dtype=torch.bfloat16, seed=2)
    expected = native().int8_linear(weight, dtype=x.dtype)(x)
    assert torch.equal(native(isa).int8_linear(weight, dtype=x.dtype)(x), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_spoils_its_row_alone(native, reference, isa):
    weight = normal(60, 200, dtype=torch.float32, seed=1)
    x = normal(9, 200, dtype=torch.float32, seed=2)
    for group in (None, 64):
        layer = native(isa).int8_linear(weight, dtype=x.dtype, group=group)
        good = layer(x)
        for bad in (float("nan"), float("inf"), float("-inf")):
            spoiled = x.clone()
            spoiled[3, 150] = bad
            out = layer(spoiled)
            assert out[3].isnan().all()
            assert reference.int8_linear(weight, dtype=x.dtype, group=group)(spoiled)[3].isnan().all()
            keep = torch.arange(9) != 3
            assert torch.equal(out[keep], good[keep])


def test_zeros_and_what_is_next_to_them(native, reference):
    weight = normal(48, 64, dtype=torch.float32, seed=1)
    weight[5] = 0.0
    x = torch.zeros(3, 64)
    x[1, 7], x[2, 7] = 1e-38, 1e-20
    out = native().int8_linear(weight, dtype=torch.float32)(x)
    assert out[:2].abs().sum() == 0
    assert out[:, 5].abs().sum() == 0
    assert torch.equal(out, reference.int8_linear(weight, dtype=torch.float32)(x))


def test_strided_inputs(native):
    backend = native()
    wide = normal(9, 200, dtype=torch.float32, seed=1)
    weight = normal(60, 80, dtype=torch.float32, seed=2)
    layer = backend.int8_linear(weight, dtype=torch.float32)
    residual = normal(9, 300, dtype=torch.float32, seed=3)
    expected = layer(wide[:, 40:120].contiguous(), residual[:, 10:70].contiguous())
    assert torch.equal(layer(wide[:, 40:120], residual[:, 10:70]), expected)
    padded = torch.cat([weight, weight], dim=1)[:, :80]
    assert torch.equal(backend.int8_linear(padded, dtype=torch.float32)(wide[:, :80]), layer(wide[:, :80]))


def test_weights_of_other_dtypes(native):
    weight = normal(60, 80, dtype=torch.bfloat16, seed=2)
    x = normal(9, 80, dtype=torch.bfloat16, seed=1)
    backend = native()
    expected = backend.int8_linear(weight.float(), dtype=torch.bfloat16)(x)
    assert torch.equal(backend.int8_linear(weight, dtype=torch.bfloat16)(x), expected)


def test_no_rows(native):
    assert native().int8_linear(torch.ones(5, 4), dtype=torch.float32)(torch.ones(0, 4)).shape == (0, 5)


def test_refuses_what_it_cannot_take(native, reference):
    for backend in (native(), reference):
        with pytest.raises(InvalidArgumentError, match="group is 100"):
            backend.int8_linear(torch.ones(5, 4), dtype=torch.float32, group=100)
        with pytest.raises(InvalidArgumentError, match="bias"):
            backend.int8_linear(torch.ones(5, 4), torch.ones(4), dtype=torch.float32)
        layer = backend.int8_linear(torch.ones(5, 4), dtype=torch.float32)
        with pytest.raises(InvalidArgumentError, match=r"x has shape \(2, 3\)"):
            layer(torch.ones(2, 3))
    with pytest.raises(InvalidArgumentError, match="float64"):
        native().int8_linear(torch.ones(5, 4), dtype=torch.float64)
    with pytest.raises(InvalidArgumentError, match="131072"):
        native().int8_linear(torch.ones(1, 131073), dtype=torch.float32)
