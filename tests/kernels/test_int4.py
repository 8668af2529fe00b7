from __future__ import annotations

import pytest
import torch

from octavo_kernels import Int4Weight, InvalidArgumentError
from octavo_kernels.int4 import quantize_int4
from tests.kernels.cases import normal


def test_written_down() -> None:
    row = torch.tensor([[-1.0, 2.0, -0.6, 0.0] + [0.5] * 28 + [3.0, 3.0]])
    weight = quantize_int4(row)
    assert weight.scales.tolist() == [[float(torch.tensor(0.2).half()), 0.0]]
    assert weight.minimums.tolist() == [[-1.0, 3.0]]
    assert weight.integers[0].tolist() == [0, 15, 2, 5] + [8] * 28 + [0, 0]  # 0.5 lies between 7 and 8, fp16 decides
    assert weight.dequantize()[0, -2:].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_features", [1, 31, 32, 33, 576])
def test_values_move_by_half_a_step_at_most(dtype: torch.dtype, in_features: int) -> None:
    values = normal(50, in_features, dtype=dtype)
    weight = quantize_int4(values)
    steps = weight.scales.float().repeat_interleave(32, dim=1)[:, :in_features]
    # fp16 rounds the minimum and the scale, by 2^-11 of themselves.
    slack = values.float().abs().max() * 2**-9
    assert ((weight.dequantize() - values.float()).abs() <= steps / 2 + slack).all()


def test_groups_are_kept() -> None:
    """What has such groups already gets the same ones again."""
    first = quantize_int4(normal(20, 256, dtype=torch.float32))
    second = quantize_int4(first.dequantize())
    torch.testing.assert_close(second.dequantize(), first.dequantize(), atol=3e-3, rtol=0)
    assert torch.equal(second.integers, first.integers)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_what_is_not_finite_becomes_nan(bad: float) -> None:
    values = normal(3, 70, dtype=torch.float32)
    values[1, 40] = bad
    dequantized = quantize_int4(values).dequantize()
    assert dequantized[1, 32:64].isnan().all()
    assert dequantized.isnan().sum() == 32


def test_parts() -> None:
    values = normal(10, 70, dtype=torch.float32)
    whole = quantize_int4(values)
    stacked = Int4Weight.stack([quantize_int4(values[:3]), quantize_int4(values[3:])])
    assert torch.equal(stacked.dequantize(), whole.dequantize())
    assert torch.equal(whole.first_rows(4).dequantize(), whole.dequantize()[:4])


def test_refuses_what_does_not_fit() -> None:
    integers, numbers = torch.zeros(4, 33, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.float16)
    Int4Weight(integers, numbers, numbers)
    for wrong in (integers.int(), integers[0], integers[:0]):
        with pytest.raises(InvalidArgumentError, match="integers have shape"):
            Int4Weight(wrong, numbers, numbers)
    for wrong in (numbers[:, :1], numbers.float()):
        with pytest.raises(InvalidArgumentError, match=r"minimums have shape .*\(4, 2\) of torch.float16"):
            Int4Weight(integers, numbers, wrong)
