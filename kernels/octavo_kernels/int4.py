"""Weights of 4 bits in groups of 32: what `Backend.int4_linear` takes, and how a matrix that has none gets them.

Files that store such groups are for the caller to read; what a backend makes of them is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.errors import InvalidArgumentError

GROUP = 32
_STEPS = 15


@dataclass(frozen=True)
class Int4Weight:
    """A matrix whose values are scale * integer + minimum, of the 32 neighbouring columns that share these two.

    integers: (out_features, in_features) uint8, 0..15; scales, minimums: (out_features, ceil(in_features / 32)) fp16.
    All on one device. The last group of a row may be shorter. Raises InvalidArgumentError for other shapes and dtypes.
    """

    integers: Tensor
    scales: Tensor
    minimums: Tensor

    def __post_init__(self) -> None:
        if self.integers.dtype is not torch.uint8 or self.integers.dim() != 2 or self.integers.numel() == 0:
            raise InvalidArgumentError(
                f"integers have shape {tuple(self.integers.shape)} and dtype {self.integers.dtype}; "
                "(out_features, in_features) of torch.uint8, neither of them 0, is needed"
            )
        out_features, in_features = self.integers.shape
        groups = (out_features, -(-in_features // GROUP))
        for name, tensor in (("scales", self.scales), ("minimums", self.minimums)):
            if tensor.shape != groups or tensor.dtype is not torch.float16:
                raise InvalidArgumentError(
                    f"{name} have shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
                    f"{groups} of torch.float16 is needed"
                )

    @staticmethod
    def stack(parts: Sequence[Int4Weight]) -> Int4Weight:
        """One below the other: a layer whose outputs are those of the parts side by side."""
        return Int4Weight(
            torch.cat([part.integers for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.minimums for part in parts]),
        )

    def to(self, device: torch.device) -> Int4Weight:
        """On this device; itself where it is there already."""
        return Int4Weight(self.integers.to(device), self.scales.to(device), self.minimums.to(device))

    def first_rows(self, count: int) -> Int4Weight:
        """The layer with the first `count` outputs alone."""
        return Int4Weight(self.integers[:count], self.scales[:count], self.minimums[:count])

    def dequantize(self) -> Tensor:
        """The values, (out_features, in_features) fp32."""
        n = self.integers.shape[1]
        scales, minimums = (
            numbers.float().repeat_interleave(GROUP, dim=1)[:, :n] for numbers in (self.scales, self.minimums)
        )
        return scales * self.integers.float() + minimums


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Rounds a matrix to 4 bits: each group's range in 15 equal steps, values to the nearest.

    weight: (out_features, in_features) of a float dtype. A group's minimum is its smallest value and its scale a
    fifteenth of its range, both rounded to fp16 before the values are. A group that holds a NaN or an infinity has NaN
    for both.
    """
    n = weight.shape[1]
    padding = -n % GROUP
    wide = weight.float()
    padded = torch.cat([wide, wide[:, -1:].expand(-1, padding)], dim=1) if padding else wide
    groups = padded.unflatten(1, (-1, GROUP))
    smallest, largest = groups.aminmax(dim=-1)
    scales, minimums = ((largest - smallest) / _STEPS).half(), smallest.half()
    is_finite = scales.isfinite() & minimums.isfinite()
    scales, minimums = (numbers.masked_fill(~is_finite, float("nan")) for numbers in (scales, minimums))
    steps = (groups - minimums.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    integers = steps.round().nan_to_num(nan=0.0).clamp(0, _STEPS).to(torch.uint8)
    return Int4Weight(integers.flatten(1)[:, :n].contiguous(), scales, minimums)
