"""The layout of 4-bit weights on the device."""

from __future__ import annotations

import torch

from octavo_kernels import Int4Weight
from octavo_kernels.triton.int4_weight import pack_grids, pack_integers


def test_a_byte_holds_columns_32_apart():
    integers = (torch.arange(64) % 16).to(torch.uint8)[None]
    integers[0, 3], integers[0, 35] = 9, 14
    packed = pack_integers(integers, 1)
    assert packed.shape == (1, 1, 32)
    assert packed[0, 0, 3] == 9 + 16 * 14
    assert pack_integers(integers[:, :40], 1)[0, 0, 8:].tolist() == integers[0, 8:32].tolist()
    assert pack_integers(torch.zeros(5, 65, dtype=torch.uint8), 2).shape == (2, 5, 32)


def test_a_word_holds_scale_and_minimum():
    scales, minimums = torch.tensor([[1.0, 0.5, -2.0]]).half(), torch.tensor([[-8.0, 0.0, 3.0]]).half()
    words = pack_grids(Int4Weight(torch.zeros(1, 90, dtype=torch.uint8), scales, minimums), 2)
    assert words.shape == (4, 1)
    halves = words.flatten().view(torch.float16)
    assert halves.tolist() == [1.0, -8.0, 0.5, 0.0, -2.0, 3.0, 0.0, 0.0]
