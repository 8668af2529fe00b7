"""Linear layers of 8-bit floats: the oracle's arithmetic, and a backend that has none."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from octavo_kernels.reference_linear import quantize_e4m3
from tests.kernels.cases import DTYPES, normal


def test_rows_are_scaled_to_the_largest_number():
    rows = [[448.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1.0, -7.0, 3.5], [1.0, float("inf"), 2.0]]
    stored, scales = quantize_e4m3(torch.tensor(rows))
    assert scales[:3, 0].tolist() == pytest.approx([1.0, 0.0, 7 / 448])
    assert scales[3].isnan().all()
    assert stored.float().tolist() == [[448.0, -2.0, 0.5], [0.0] * 3, [64.0, -448.0, 224.0], [0.0] * 3]


def test_written_down(reference):
    # Weights: 448 and -224 steps of 1/448, 88 (of 89.6) and 448 of 2/448; activations: 448 and 176 (of 179.2) of 5/448.
    layer = reference.fp8_linear(torch.tensor([[1.0, -0.5], [0.4, 2.0]]), torch.tensor([1.0, 0.0]), dtype=torch.float32)
    out = layer(torch.tensor([[5.0, 2.0]]), torch.tensor([[0.0, 3.0]]))
    expected = [(448 * 448 - 224 * 176) * 5 / 448 / 448 + 1, (88 * 448 + 448 * 176) * 5 / 448 * 2 / 448 + 3]
    assert out[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_near_the_layer_that_is_not_quantized(reference, dtype):
    weight, x = normal(60, 200, dtype=dtype, seed=1), normal(9, 200, dtype=dtype, seed=2)
    expected = reference.linear(weight, out_dtype=torch.float32)(x)
    out = reference.fp8_linear(weight, dtype=dtype, out_dtype=torch.float32)(x)
    assert 0 < (out - expected).norm() / expected.norm() < 0.05


def test_what_is_not_finite_spoils_its_row_and_its_column_alone(reference):
    weight, x = normal(6, 20, dtype=torch.float32, seed=1), normal(3, 20, dtype=torch.float32, seed=2)
    weight[4, 3], x[1, 7] = float("nan"), float("-inf")
    is_nan = reference.fp8_linear(weight, dtype=x.dtype)(x).isnan()
    assert is_nan[1].all()
    assert is_nan[[0, 2]].sum() == is_nan[[0, 2], 4].sum() == 2


def test_refuses_what_it_cannot_take(native, reference):
    with pytest.raises(InvalidArgumentError, match="no linear layers of 8-bit floats"):
        native().fp8_linear(torch.ones(5, 4), dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match="bias"):
        reference.fp8_linear(torch.ones(5, 4), torch.ones(4), dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match=r"x has shape \(2, 3\)"):
        reference.fp8_linear(torch.ones(5, 4), dtype=torch.float32)(torch.ones(2, 3))
