"""A fixed rotation of a model's residual stream, folded into its weights.

Some dimensions of the residual stream are many times larger than the others, and 8-bit activations spend their range
on them. RMSNorm without gains and the sums of the residual stream do not care about a rotation, so one can be
multiplied into the weights on both sides of it, and spreads those dimensions over all, at no cost when the model
computes (Ashkboos et al., SliceGPT, 2024, section 3.1; QuaRot, 2024). Which weights stand on which side is for
`layers`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGEST_HADAMARD = 64
_STEP_ELEMENTS = 1 << 18


class Rotation:
    """An orthonormal matrix of any order, applied in a few small steps.

    Signs first, scattered but fixed; then a Kronecker product of the discrete cosine transform of the order's odd part
    and of Hadamard matrices.
    """

    def __init__(self, order: int) -> None:
        self.order = order
        index = torch.arange(order, dtype=torch.int64)
        self._signs = 1.0 - 2.0 * ((index * 2654435761 >> 15) & 1).float()
        self._factors: list[Tensor] = []
        power = order & -order
        if order != power:
            self._factors.append(_cosines(order // power))
        while power > 1:
            size = min(power, _LARGEST_HADAMARD)
            self._factors.append(_hadamard(size))
            power //= size

    def rotate(self, x: Tensor, dim: int = -1) -> Tensor:
        """Multiplies the rows along `dim`, which has `order` values, by the matrix. x: fp32, not mutated."""
        dim %= x.dim()
        if x.dim() == 2 and dim == 1:
            # A few rows at a time stay in the cache, and take no memory to speak of beside the result.
            result = torch.empty_like(x)
            step = max(_STEP_ELEMENTS // self.order, 1)
            for rows, rotated in zip(x.split(step), result.split(step), strict=True):
                rotated.copy_(self._rotate(rows, dim))
            return result
        return self._rotate(x, dim)

    def _rotate(self, x: Tensor, dim: int) -> Tensor:
        before, behind = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
        result = x.reshape(before, self.order, behind) * self._signs[:, None]
        left, right = before, self.order * behind
        for factor in self._factors:
            right //= len(factor)
            rows = result.view(left, len(factor), right)
            result = rows.squeeze(2) @ factor if right == 1 else factor.T @ rows
            left *= len(factor)
        return result.view(x.shape)


def _hadamard(order: int) -> Tensor:
    """Sylvester's Hadamard matrix of a power of two, scaled to be orthonormal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(order)


def _cosines(order: int) -> Tensor:
    """The orthonormal discrete cosine transform, type II."""
    position = torch.arange(order, dtype=torch.float64)
    angles = (position[:, None] + 0.5) * position * (math.pi / order)
    matrix = angles.cos() * math.sqrt(2 / order)
    matrix[:, 0] = math.sqrt(1 / order)
    return matrix.float()
