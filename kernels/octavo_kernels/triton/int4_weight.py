"""How 4-bit weights lie in the device's memory: every load of a step is whole, and wide enough to be made early.

A step is 64 columns: 32 in the low halves of its bytes, the next 32 in the high ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.errors import InvalidArgumentError

STEP = 64


def pack_integers(integers: Tensor, num_steps: int) -> Tensor:
    """(num_steps, out_features, 32) uint8 of (out_features, in_features) integers 0..15, zero behind in_features."""
    padded = torch.nn.functional.pad(integers, (0, num_steps * STEP - integers.shape[1]))
    halves: Tensor = padded.unflatten(1, (-1, 2, STEP // 2))
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).transpose(0, 1).contiguous()


def pack_grids(integers: Tensor, scales: Tensor, minimums: Tensor, group: int, num_steps: int) -> Tensor:
    """(groups, out_features) int32: the bits of a group's scale, and above them those of its minimum.

    integers: (out_features, in_features), only for its shape; scales, minimums: (out_features, ceil(in_features /
    group)) fp16. As many groups as num_steps steps have, zeros for those that are padding alone. Raises
    InvalidArgumentError for other shapes and dtypes.
    """
    out_features, in_features = integers.shape
    wanted = (out_features, -(-in_features // group))
    for name, tensor in (("scales", scales), ("minimums", minimums)):
        if tensor.shape != wanted or tensor.dtype is not torch.float16:
            raise InvalidArgumentError(
                f"{name} have shape {tuple(tensor.shape)} and dtype {tensor.dtype}; {wanted} of torch.float16 is needed"
            )
    words = torch.stack((scales, minimums), dim=-1).view(torch.int32).squeeze(-1)  # the lower half first
    num_groups = -(-num_steps * STEP // group)
    return torch.nn.functional.pad(words, (0, num_groups - wanted[1])).T.contiguous()
