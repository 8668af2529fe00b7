"""4-bit linear layers: the oracle's arithmetic to the last digit, and bit for bit whatever rows stand beside a row."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import Int4Weight, InvalidArgumentError
from octavo_kernels.int4 import quantize_int4
from tests.kernels.cases import DTYPES, ISAS, normal

# (out_features, in_features, rows)
SHAPES = [
    (48, 64, 1),
    (100, 33, 7),
    (1, 1, 3),
    (577, 576, 20),
    (50, 577, 13),
    (192, 100, 130),
    (60, 1536, 9),
    (49, 300, 8),
    (20, 50, 5),
]
FUSED = [isa for isa in ISAS if isa != "generic"]


def random_weight(out_features: int, in_features: int, *, seed: int = 1) -> Int4Weight:
    """Integers, scales and minimums of which none follows from the others."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, generator=generator)
    groups = (out_features, -(-in_features // 32))
    scale = in_features**-0.5
    return Int4Weight(
        integers,
        normal(*groups, dtype=torch.float16, seed=seed + 1, scale=scale / 8),
        normal(*groups, dtype=torch.float16, seed=seed + 2, scale=scale),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features", "rows"), SHAPES)
def test_matches_reference(native, reference, isa, dtype, out_features, in_features, rows):
    backend = native(isa)
    weight = random_weight(out_features, in_features)
    bias = normal(out_features, dtype=torch.float32, seed=2)
    x = normal(rows, in_features, dtype=dtype, seed=3)
    residual = normal(rows, out_features, dtype=dtype, seed=4)
    for given, beside in ((None, None), (bias, None), (bias, residual)):
        out = backend.int4_linear(weight, given, dtype=dtype)(x, beside)
        expected = reference.int4_linear(weight, given, dtype=dtype)(x, beside)
        if isa == "generic":  # SSE has no fused multiply-add
            digits = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            torch.testing.assert_close(out, expected, atol=5e-6, rtol=digits)
        elif dtype is torch.float32:
            # The oracle's multiply-add rounds to fp64 first, which moves a digit once in 2^29.
            torch.testing.assert_close(out, expected, atol=3e-7, rtol=1.2e-7)
        else:
            assert torch.equal(out, expected)


def test_written_down(native):
    # Weights 0.5 * (0, 15, 3) - 2 in the first group and 0.25 * 4 + 1 in the second; activations: 127, -64 and 32
    # steps of 1, and 127 steps of 3 / 127.
    integers = torch.zeros(1, 33, dtype=torch.uint8)
    integers[0, :3], integers[0, 32] = torch.tensor([0, 15, 3], dtype=torch.uint8), 4
    scales, minimums = torch.tensor([[0.5, 0.25]]).half(), torch.tensor([[-2.0, 1.0]]).half()
    x = torch.zeros(1, 33)
    x[0, :3], x[0, 32] = torch.tensor([127.0, -64.0, 32.0]), 3.0
    out = native().int4_linear(Int4Weight(integers, scales, minimums), dtype=torch.float32)(x)
    assert out.item() == pytest.approx(127 * -2 - 64 * 5.5 + 32 * -0.5 + 3 * 2, rel=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_largest_sums_do_not_overflow(native, isa):
    ones = torch.ones(50, 48, dtype=torch.float16)
    weight = Int4Weight(torch.full((50, 1536), 15, dtype=torch.uint8), ones, -ones)
    for value in (127.0, -127.0):
        out = native(isa).int4_linear(weight, dtype=torch.float32)(torch.full((9, 1536), value))
        assert torch.equal(out, torch.full((9, 50), value * 14 * 1536))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_own_bits(native, isa, dtype):
    layer = native(isa).int4_linear(random_weight(150, 99), dtype=dtype)
    x = normal(513, 99, dtype=dtype, seed=2)
    # Every row once as the only row.
    alone = torch.cat([layer(x[i : i + 1]) for i in range(513)])
    for rows in [*range(1, 71), 129, 513]:
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


def test_thread_counts_agree(native):
    weight, x = random_weight(577, 576), normal(300, 576, dtype=torch.bfloat16, seed=2)
    results = [native(num_threads=n).int4_linear(weight, dtype=x.dtype)(x) for n in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", FUSED)
def test_instruction_sets_agree(native, isa):
    weight, x = random_weight(100, 333), normal(20, 333, dtype=torch.float32, seed=2)
    expected = native().int4_linear(weight, dtype=x.dtype)(x)
    assert torch.equal(native(isa).int4_linear(weight, dtype=x.dtype)(x), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite_spoils_its_row_alone(native, reference, isa):
    weight = random_weight(60, 200)
    x = normal(9, 200, dtype=torch.float32, seed=2)
    layer = native(isa).int4_linear(weight, dtype=x.dtype)
    good = layer(x)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoiled = x.clone()
        spoiled[3, 150] = bad
        out = layer(spoiled)
        assert out[3].isnan().all()
        assert reference.int4_linear(weight, dtype=x.dtype)(spoiled)[3].isnan().all()
        keep = torch.arange(9) != 3
        assert torch.equal(out[keep], good[keep])


def test_a_weight_that_is_not_finite_spoils_its_column_alone(native):
    values = normal(60, 200, dtype=torch.float32, seed=1)
    x = normal(9, 200, dtype=torch.float32, seed=2)
    good = native().int4_linear(quantize_int4(values), dtype=x.dtype)(x)
    for bad in (float("nan"), float("inf"), 1e30):
        spoiled = values.clone()
        spoiled[7, 199] = bad
        out = native().int4_linear(quantize_int4(spoiled), dtype=x.dtype)(x)
        assert out[:, 7].isnan().all()
        keep = torch.arange(60) != 7
        assert torch.equal(out[:, keep], good[:, keep])


def test_zeros_and_what_is_next_to_them(native, reference):
    weight = random_weight(48, 64)
    x = torch.zeros(3, 64)
    x[1, 7], x[2, 7] = 1e-38, 1e-20
    out = native().int4_linear(weight, dtype=torch.float32)(x)
    assert out[:2].abs().sum() == 0
    assert torch.equal(out, reference.int4_linear(weight, dtype=torch.float32)(x))


def test_strided_inputs(native):
    wide = normal(9, 200, dtype=torch.float32, seed=1)
    layer = native().int4_linear(random_weight(60, 80), dtype=torch.float32)
    residual = normal(9, 300, dtype=torch.float32, seed=3)
    expected = layer(wide[:, 40:120].contiguous(), residual[:, 10:70].contiguous())
    assert torch.equal(layer(wide[:, 40:120], residual[:, 10:70]), expected)


def test_strided_weights(native):
    weight = random_weight(60, 96)
    strided = Int4Weight(weight.integers.T.contiguous().T, weight.scales.T.contiguous().T, weight.minimums)
    x = normal(9, 96, dtype=torch.bfloat16, seed=1)
    expected = native().int4_linear(weight, dtype=x.dtype)(x)
    assert torch.equal(native().int4_linear(strided, dtype=x.dtype)(x), expected)


def test_no_rows(native):
    assert native().int4_linear(random_weight(5, 4), dtype=torch.float32)(torch.ones(0, 4)).shape == (0, 5)


def test_refuses_what_it_cannot_take(native, reference):
    weight = random_weight(5, 4)
    for backend in (native(), reference):
        with pytest.raises(InvalidArgumentError, match="bias"):
            backend.int4_linear(weight, torch.ones(4), dtype=torch.float32)
        layer = backend.int4_linear(weight, dtype=torch.float32)
        with pytest.raises(InvalidArgumentError, match=r"x has shape \(2, 3\)"):
            layer(torch.ones(2, 3))
    with pytest.raises(InvalidArgumentError, match="float64"):
        native().int4_linear(weight, dtype=torch.float64)
