"""The oracle's linear layers in plain torch, and how it quantizes rows: the arithmetic of `Backend` to the digit."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from octavo_kernels.backend import QUANTIZED_LIMITS, results_dtype
from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.int4 import GROUP, Int4Weight


def wide(x: Tensor) -> Tensor:
    """In fp32; float64 stays what it is."""
    return x if x.dtype is torch.float64 else x.to(torch.float32)


class _CheckedLinear(ABC):
    """What all linear layers have in common: checks before the product, and the residual and the rounding behind it."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
        self.out_features, self.in_features = out_features, in_features
        self._dtype, self._out_dtype = dtype, results_dtype(out_dtype, dtype)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dtype is not self._dtype or x.dim() != 2 or x.shape[1] != self.in_features:
            raise InvalidArgumentError(
                f"x has shape {tuple(x.shape)} and dtype {x.dtype}; "
                f"(rows, {self.in_features}) of {self._dtype} is needed"
            )
        out = self._product(x)
        if residual is not None:
            if residual.shape != out.shape or residual.dtype is not x.dtype or x.dtype is not self._out_dtype:
                raise InvalidArgumentError(
                    f"residual has shape {tuple(residual.shape)} and dtype {residual.dtype}; "
                    f"{tuple(out.shape)} of {x.dtype} is needed"
                )
            out = out + residual.to(out.dtype)
        return out.to(self._out_dtype)

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias, not yet rounded to the dtype of results."""


class ReferenceLinear(_CheckedLinear):
    """A linear layer over a widened copy of its weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
        _check_weight(weight, bias)
        super().__init__(weight.shape[0], weight.shape[1], weight.dtype, out_dtype)
        self._weight = wide(weight)
        self._bias = None if bias is None else wide(bias)

    def _product(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(wide(x), self._weight, self._bias)


class ReferenceInt8Linear(_CheckedLinear):
    """The arithmetic of `Backend.int8_linear`, integers held exactly in float64."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        group: int | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        _check_weight(weight, bias)
        if group is not None and (group < 64 or group % 64 != 0):
            raise InvalidArgumentError(f"group is {group}; it must be a multiple of 64")
        super().__init__(weight.shape[0], weight.shape[1], dtype, out_dtype)
        self._group = group or self.in_features
        integers, scales = quantize_rows(weight.to(torch.float32), self.in_features)
        self._weight, self._scales = integers.squeeze(1), scales.squeeze(1)
        self._bias = None if bias is None else bias.to(torch.float32)

    def _product(self, x: Tensor) -> Tensor:
        integers, scales = quantize_rows(x.to(torch.float32), self._group)
        out = torch.zeros((x.shape[0], self.out_features), dtype=torch.float32, device=x.device)
        for index, columns in enumerate(self._weight.split(self._group, dim=1)):
            dots = integers[:, index, : columns.shape[1]] @ columns.T  # exact
            scale = scales[:, index, None]
            # Multiply-add fused: the product of two fp32 numbers is exact in float64.
            out = (scale.double() * dots.float().double() + out.double()).float()
        out = out * self._scales
        return out if self._bias is None else out + self._bias


class ReferenceFp8Linear(_CheckedLinear):
    """The arithmetic of `Backend.fp8_linear`, dot products rounded to fp32 once."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> None:
        _check_weight(weight, bias)
        super().__init__(weight.shape[0], weight.shape[1], dtype, out_dtype)
        self._weight, scales = quantize_e4m3(weight.to(torch.float32))
        self._scales = scales.squeeze(1)
        self._bias = None if bias is None else bias.to(torch.float32)

    def _product(self, x: Tensor) -> Tensor:
        stored, scales = quantize_e4m3(x.to(torch.float32))
        out = (stored.double() @ self._weight.double().T).float() * scales * self._scales
        return out if self._bias is None else out + self._bias


class ReferenceInt4Linear(_CheckedLinear):
    """The arithmetic of `Backend.int4_linear`, integers and products of two fp32 numbers held exactly in float64."""

    def __init__(
        self, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weight.integers.shape[0], weight.integers.shape[1], dtype, out_dtype)
        if bias is not None and bias.shape != (self.out_features,):
            raise InvalidArgumentError(f"bias has shape {tuple(bias.shape)}; ({self.out_features},) is needed")
        self._integers = weight.integers.double()
        self._scales, self._minimums = weight.scales.float().T, weight.minimums.float().T  # (groups, out_features)
        self._bias = None if bias is None else bias.to(torch.float32)

    def _product(self, x: Tensor) -> Tensor:
        integers, scales = quantize_rows(x.to(torch.float32), GROUP)
        sums = scales * integers.sum(dim=-1).float()  # (rows, groups)
        out = torch.zeros((x.shape[0], self.out_features), dtype=torch.float32, device=x.device)
        for group, columns in enumerate(self._integers.split(GROUP, dim=1)):
            dots = (integers[:, group, : columns.shape[1]] @ columns.T).float() * self._scales[group]
            out = (scales[:, group, None].double() * dots.double() + out.double()).float()
            out = (sums[:, group, None].double() * self._minimums[group].double() + out.double()).float()
        return out if self._bias is None else out + self._bias


def _check_weight(weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise InvalidArgumentError(
            f"weight has shape {tuple(weight.shape)} and bias {None if bias is None else tuple(bias.shape)}; "
            "(out_features, in_features) and (out_features,) are needed"
        )


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """8-bit integers and scales of every group of each row, by the rules of `Backend.int8_linear`.

    x: (rows, n) fp32. Returns (rows, groups, group) float64 with values in -127..127, zero behind n, and (rows, groups)
    fp32.
    """
    values, scales = scale_rows(x, group, 127.0)
    return values.round().double(), scales


def quantize_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit floats and the scale of every row, by the rules of `Backend.write_kv`.

    x: (rows, n) fp32. Returns (rows, n) float8_e4m3fn and (rows, 1) fp32.
    """
    values, scales = scale_rows(x, x.shape[1], QUANTIZED_LIMITS[torch.float8_e4m3fn])
    return values.squeeze(1).to(torch.float8_e4m3fn), scales


def scale_rows(x: Tensor, group: int, limit: float) -> tuple[Tensor, Tensor]:
    """Every group of each row brought to the largest magnitude `limit`, not yet rounded; shapes as `quantize_rows`."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    magnitude = groups.abs().amax(dim=-1)
    is_finite, is_zero = magnitude.isfinite(), magnitude < 2.0**-100
    largest = torch.full_like(magnitude, limit)  # a number over a tensor would be a reciprocal and a product
    scales = (magnitude / largest).masked_fill(is_zero, 0.0).masked_fill(~is_finite, float("nan"))
    inverse = (largest / magnitude).masked_fill(is_zero | ~is_finite, 0.0)
    return (groups * inverse.unsqueeze(-1)).masked_fill(~is_finite.unsqueeze(-1), 0.0), scales
