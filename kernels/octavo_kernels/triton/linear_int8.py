"""8-bit linear layers: integer weights and integer activations, with exact integer sums.

Dettmers et al., "LLM.int8(): 8-bit matrix multiplication for transformers at scale", 2022, section 2, row-wise scales;
the arithmetic is stated at `Backend.int8_linear`. Dot products are exact and every rounding behind them is fixed
(compiled without contraction), so a row's bits depend neither on tiles, nor on parts, nor on its neighbours.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.reference_linear import quantize_rows as reference_quantize_rows
from octavo_kernels.triton.device import device_traits
from octavo_kernels.triton.linear_tiles import finish, num_parts, sum_parts, tile_at, tiles_for
from octavo_kernels.triton.quantize_rows import quantize_rows
from octavo_kernels.triton.tiled_linear import TiledLinear, parts_of
from octavo_kernels.triton.variant import Variant

_STEP = 128
_ELEMENTS_AT_ONCE = 1 << 24
_LARGEST_GROUP = 131_072  # of products of 127 * 127, which then fit 32 bits


@triton.jit(do_not_specialize=["rows"])
def _linear_int8_kernel(
    x_ptr,  # (rows, in_features) int8
    x_scales_ptr,  # (rows, in_features / GROUP), or (rows,) where GROUP is 0
    weight_ptr,  # (out_features, in_features) int8
    weight_scales_ptr,  # (out_features,)
    bias_ptr,  # (out_features,) fp32 or None
    residual_ptr,  # (rows, out_features) or None
    out_ptr,  # (rows, out_features), or int32 (PARTS, rows, out_features) where PARTS > 1
    rows,
    in_features,  # a multiple of STEP
    out_features,
    residual_stride,
    GROUP: tl.constexpr,  # 0: one for the whole row; otherwise a multiple of STEP
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
):
    tile_m, tile_n = tile_at(tl.program_id(0), rows, out_features, BLOCK_M, BLOCK_N)
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the ends rows and columns begin anew: loads need no masks, and what they give is not stored.
    x_row, weight_row = (row % rows).to(tl.int64), (column % out_features).to(tl.int64)
    depth = tl.arange(0, STEP)
    x_ptrs = x_ptr + x_row[:, None] * in_features + depth[None, :]
    weight_ptrs = weight_ptr + weight_row[:, None] * in_features + depth[None, :]
    mask = (row < rows)[:, None] & (column < out_features)[None, :]
    if GROUP == 0:
        steps = in_features // STEP
        first = tl.program_id(1) * tl.cdiv(steps, PARTS)
        last = tl.minimum(first + tl.cdiv(steps, PARTS), steps)
        dots = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for step in range(first, last):
            x = tl.load(x_ptrs + step * STEP)
            weight = tl.load(weight_ptrs + step * STEP)
            dots = tl.dot(x, tl.trans(weight), dots, out_dtype=tl.int32)
        if PARTS > 1:
            part_ptr = out_ptr + tl.program_id(1).to(tl.int64) * rows * out_features
            tl.store(part_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :], dots, mask=mask)
            return
        total = tl.load(x_scales_ptr + x_row)[:, None] * dots.to(tl.float32)
    else:
        groups = in_features // GROUP
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        next_scale = tl.load(x_scales_ptr + x_row * groups)
        for group in range(0, groups):
            # Asked for a group ahead: unlike an operand's, its load is not made early by the compiler.
            scale = next_scale
            next_scale = tl.load(x_scales_ptr + x_row * groups + tl.minimum(group + 1, groups - 1))
            dots = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            for step in tl.static_range(GROUP // STEP):
                x = tl.load(x_ptrs + group * GROUP + step * STEP)
                weight = tl.load(weight_ptrs + group * GROUP + step * STEP)
                dots = tl.dot(x, tl.trans(weight), dots, out_dtype=tl.int32)
            total = tl.fma(tl.broadcast_to(scale[:, None], (BLOCK_M, BLOCK_N)), dots.to(tl.float32), total)
    total = total * tl.load(weight_scales_ptr + weight_row)[None, :]
    finish(total, row[:, None], column[None, :], mask, bias_ptr, residual_ptr, residual_stride, out_ptr, out_features)


class Int8Linear(TiledLinear):
    """A layer of `Backend.int8_linear`; keeps 8-bit weights with their scales."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        group: int | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(weight, bias, dtype, out_dtype)
        if group is not None and (group < 64 or group % 64 != 0):
            raise InvalidArgumentError(f"group is {group}; it must be a multiple of 64")
        if min(group or self.in_features, self.in_features) > _LARGEST_GROUP:
            raise InvalidArgumentError(
                f"weight has {self.in_features} in_features; at most {_LARGEST_GROUP} can share a scale"
            )
        is_whole = group is None or group >= self.in_features
        self._group = triton.cdiv(self.in_features, _STEP) * _STEP if is_whole or group is None else group
        self._num_groups = triton.cdiv(self.in_features, self._group)
        self._weight, self._scales = _quantize_weight(weight, self._group * self._num_groups)

    def _compute(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        rows = x.shape[0]
        integers, scales = quantize_rows(x, self._group, self._num_groups, torch.int8)
        tiles, in_features = tiles_for(rows), integers.shape[1]
        programs = triton.cdiv(rows, tiles.block_m) * triton.cdiv(self.out_features, tiles.block_n)
        is_whole = self._num_groups == 1
        if not is_whole and rows <= 32:  # the sum is not cut, so each of the few programs has to have much on its way
            tiles = replace(tiles, num_stages=10)
        parts = num_parts(programs, rows, in_features // _STEP, device_traits(x.device).num_sms) if is_whole else 1
        target = parts_of(out, parts, torch.int32)
        _linear_int8_kernel[(programs, parts)](
            integers, scales, self._weight, self._scales, self._bias, residual, target,
            rows, in_features, self.out_features, 0 if residual is None else residual.stride(0),
            GROUP=0 if is_whole else self._group, PARTS=parts, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            STEP=_STEP if self._group % _STEP == 0 else 64,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
        if parts > 1:
            sum_parts(target, (scales.view(-1), self._scales), self._bias, residual, out)


def _quantize_weight(weight: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """(out_features, padded) int8, zero behind in_features, and (out_features,) fp32. A few rows at a time: the
    oracle holds integers in float64."""
    integers = torch.empty((weight.shape[0], padded), dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for rows in torch.arange(weight.shape[0]).split(max(1, _ELEMENTS_AT_ONCE // padded)):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        wide, wide_scales = reference_quantize_rows(weight[part].to(torch.float32), padded)
        integers[part], scales[part] = wide[:, 0].to(torch.int8), wide_scales[:, 0]
    return integers, scales


def variants() -> list[Variant]:
    """Few rows in parts, many rows, groups of 64."""

    def make(name: str, rows: int, group: int, parts: int) -> Variant:
        tiles = tiles_for(rows) if group == 0 or rows > 32 else replace(tiles_for(rows), num_stages=10)
        scales = {"x_scales_ptr": "*fp32", "weight_scales_ptr": "*fp32"}
        operands = {"x_ptr": "*i8", "weight_ptr": "*i8", **scales, "out_ptr": "*i32" if parts > 1 else "*bf16"}
        sizes = {"rows": "i32", "in_features": "i32", "out_features": "i32", "residual_stride": "i32"}
        shape = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "STEP": 64 if group == 64 else _STEP}
        return Variant(
            name, _linear_int8_kernel, {**operands, "residual_ptr": "*bf16", **sizes},
            {"bias_ptr": None, "GROUP": group, "PARTS": parts, **shape},
            tiles.num_warps, tiles.num_stages, unaligned=frozenset({"rows"}),
        )  # fmt: skip

    return [
        make("1 to 16 rows in parts", 16, 0, 4),
        make("64 rows, bf16", 64, 0, 1),
        make("many rows, bf16", 4096, 0, 1),
        make("1 to 16 rows, groups of 64, bf16", 16, 64, 1),
        make("many rows, groups of 64, bf16", 4096, 64, 1),
    ]
