"""How 4-bit weights lie in the device's memory: every load of a step is whole, and wide enough to be made early.

A step is 64 columns: 32 in the low halves of its bytes, the next 32 in the high ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.int4 import GROUP, Int4Weight

STEP = 64


def pack_integers(integers: Tensor, num_steps: int) -> Tensor:
    """(num_steps, out_features, 32) uint8 of (out_features, in_features) integers 0..15, zero behind in_features."""
    padded = torch.nn.functional.pad(integers, (0, num_steps * STEP - integers.shape[1]))
    halves: Tensor = padded.unflatten(1, (-1, 2, STEP // 2))
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).transpose(0, 1).contiguous()


def pack_grids(weight: Int4Weight, num_steps: int) -> Tensor:
    """(groups, out_features) int32: the bits of a group's scale, and above them those of its minimum.

    As many groups as num_steps steps have, zeros for those that are padding alone.
    """
    words = torch.stack((weight.scales, weight.minimums), dim=-1).view(torch.int32).squeeze(-1)  # the lower half first
    return torch.nn.functional.pad(words, (0, num_steps * (STEP // GROUP) - words.shape[1])).T.contiguous()
