from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo_worker.loaders.gguf import QUANT_TYPES, QuantType
from octavo_worker.loaders.gguf_quants import dequantize, int4_groups

BLOCKS = np.load(Path(__file__).parents[1] / "data" / "gguf_blocks.npz")


@pytest.mark.parametrize("quant_type", QUANT_TYPES.values(), ids=lambda item: item.name)
def test_values_equal_those_of_the_gguf_package(quant_type: QuantType) -> None:
    data = torch.from_numpy(BLOCKS[f"{quant_type.name}.bytes"])
    expected = torch.from_numpy(BLOCKS[f"{quant_type.name}.values"])
    torch.testing.assert_close(dequantize(data, quant_type, torch.float32), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(
        dequantize(data, quant_type, torch.bfloat16), dequantize(data, quant_type, torch.float32).bfloat16()
    )


@pytest.mark.parametrize("quant_type", QUANT_TYPES.values(), ids=lambda item: item.name)
def test_groups_of_4_bits_are_those_of_the_file(quant_type: QuantType) -> None:
    data = torch.from_numpy(BLOCKS[f"{quant_type.name}.bytes"])
    groups = int4_groups(data, quant_type)
    if quant_type.name not in ("Q4_0", "Q4_1", "Q4_K"):
        assert groups is None
        return
    assert groups is not None
    integers, scales, minimums = groups
    assert integers.dtype is torch.uint8
    assert integers.max() == 15
    assert scales.dtype is minimums.dtype is torch.float16
    values = scales.float()[:, None] * integers.float().view(-1, 32) + minimums.float()[:, None]
    expected = dequantize(data, quant_type, torch.float32).view(-1, 32)
    if quant_type.name == "Q4_K":  # its scales are products, rounded to fp16
        slack = 2**-11 * (scales.float().abs() * 15 + minimums.float().abs())[:, None]
        assert ((values - expected).abs() <= slack + 1e-6).all()
    else:
        assert torch.equal(values, expected)
