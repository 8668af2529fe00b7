"""What a layer of quantized weights does around its kernel: checks, its bias, its result, and room for parts."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from octavo_kernels.backend import results_dtype
from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.triton.checks import ACTIVATION_DTYPES
from octavo_kernels.triton.linear_tiles import check_call, check_weight


class TiledLinear(ABC):
    """A `Linear` whose weights are its subclass's to keep; the bias is kept in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
        """weight: (out_features, in_features), looked at for its shape alone; for the others see `Backend`."""
        check_weight(weight, bias)
        if dtype not in ACTIVATION_DTYPES:
            raise InvalidArgumentError(f"dtype is {dtype}; float32, bfloat16 and float16 are supported")
        self.out_features, self.in_features = weight.shape
        self._dtype, self._out_dtype = dtype, results_dtype(out_dtype, dtype)
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        check_call(x, residual, self.in_features, self.out_features, self._dtype, self._out_dtype)
        out = torch.empty((x.shape[0], self.out_features), dtype=self._out_dtype, device=x.device)
        if x.shape[0] > 0:
            self._compute(x, residual, out)
        return out

    @abstractmethod
    def _compute(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Writes the results of at least one row."""


def parts_of(out: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """Where a kernel writes: (parts, rows, out_features) of dtype for `sum_parts`, or out where the sum is not cut."""
    return out if parts == 1 else torch.empty((parts, *out.shape), dtype=dtype, device=out.device)
