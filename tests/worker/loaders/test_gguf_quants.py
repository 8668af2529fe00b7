from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo_worker.loaders.gguf import QUANT_TYPES, QuantType
from octavo_worker.loaders.gguf_quants import dequantize

BLOCKS = np.load(Path(__file__).parents[1] / "data" / "gguf_blocks.npz")


@pytest.mark.parametrize("quant_type", QUANT_TYPES.values(), ids=lambda item: item.name)
def test_values_equal_those_of_the_gguf_package(quant_type: QuantType) -> None:
    data = torch.from_numpy(BLOCKS[f"{quant_type.name}.bytes"])
    expected = torch.from_numpy(BLOCKS[f"{quant_type.name}.values"])
    torch.testing.assert_close(dequantize(data, quant_type, torch.float32), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(
        dequantize(data, quant_type, torch.bfloat16), dequantize(data, quant_type, torch.float32).bfloat16()
    )
