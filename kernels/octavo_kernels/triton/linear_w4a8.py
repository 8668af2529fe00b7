"""Linear layers of 4-bit weights in groups of 32 whose activations are quantized to 8 bits as the layer is called.

The arithmetic is stated at `Backend.int4_linear`: a group's dot product is an exact integer, and what follows are fused
multiply-adds in a fixed order, compiled without any other contraction. So a row's bits depend neither on tiles nor on
its neighbours, and the sum over groups is never cut into parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.backend import results_dtype
from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.triton.checks import ACTIVATION_DTYPES
from octavo_kernels.triton.int4_weight import STEP, pack_grids, pack_integers
from octavo_kernels.triton.linear_tiles import Tiles, check_call, check_weight, finish, tile_at
from octavo_kernels.triton.quantize_rows import quantize_rows
from octavo_kernels.triton.variant import Variant

GROUP = 32


@triton.jit
def _add_group(total, integers, x, x_scale, x_sum, grid, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """total and what one group adds to it. integers: (BLOCK_N, 32); x: (32, BLOCK_M); total: (BLOCK_N, BLOCK_M)."""
    scale = (grid & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = (grid >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    dots = tl.dot(integers.to(tl.int8, bitcast=True), x, zeros, out_dtype=tl.int32).to(tl.float32) * scale[:, None]
    total = tl.fma(tl.broadcast_to(x_scale[None, :], (BLOCK_N, BLOCK_M)), dots, total)
    sums = tl.broadcast_to(x_sum[None, :], (BLOCK_N, BLOCK_M))
    return tl.fma(sums, tl.broadcast_to(minimum[:, None], (BLOCK_N, BLOCK_M)), total)


@triton.jit
def _load_group(scale_ptrs, sum_ptrs, grid_ptrs, group, out_features):
    return tl.load(scale_ptrs + group), tl.load(sum_ptrs + group), tl.load(grid_ptrs + group * out_features)


@triton.jit(do_not_specialize=["rows"])
def _linear_w4a8_kernel(
    x_ptr,  # (rows, 64 * steps) int8
    x_scales_ptr,  # (rows, 2 * steps)
    x_sums_ptr,  # (rows, 2 * steps)
    packed_ptr,  # (steps, out_features, 32) uint8
    grids_ptr,  # (2 * steps, out_features) int32, see `pack_grids`
    bias_ptr,  # (out_features,) fp32 or None
    residual_ptr,  # (rows, out_features) or None
    out_ptr,  # (rows, out_features)
    rows,
    out_features,
    steps,
    residual_stride,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile_m, tile_n = tile_at(tl.program_id(0), rows, out_features, BLOCK_M, BLOCK_N)
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the ends rows and columns begin anew: loads need no masks, and what they give is not stored.
    x_row, output = (row % rows).to(tl.int64), column % out_features
    depth = tl.arange(0, 32)
    x_ptrs = x_ptr + x_row[None, :] * (steps * 64) + depth[:, None]
    packed_ptrs = packed_ptr + output.to(tl.int64)[:, None] * 32 + depth[None, :]
    scale_ptrs, sum_ptrs = x_scales_ptr + x_row * (2 * steps), x_sums_ptr + x_row * (2 * steps)
    grid_ptrs = grids_ptr + output
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if AHEAD:
        # Unlike the operands', these loads are not made early by the compiler: they are asked for a step ahead.
        scale_a, sum_a, grid_a = _load_group(scale_ptrs, sum_ptrs, grid_ptrs, 0, out_features)
        scale_b, sum_b, grid_b = _load_group(scale_ptrs, sum_ptrs, grid_ptrs, 1, out_features)
        for step in range(0, steps):
            pairs = tl.load(packed_ptrs + tl.cast(step, tl.int64) * out_features * 32)
            x_a, x_b = tl.load(x_ptrs + step * 64), tl.load(x_ptrs + step * 64 + 32)
            following = 2 * tl.minimum(step + 1, steps - 1)
            next_a, next_sum_a, next_grid_a = _load_group(scale_ptrs, sum_ptrs, grid_ptrs, following, out_features)
            next_b, next_sum_b, next_grid_b = _load_group(scale_ptrs, sum_ptrs, grid_ptrs, following + 1, out_features)
            total = _add_group(total, pairs & 0xF, x_a, scale_a, sum_a, grid_a, BLOCK_N, BLOCK_M)
            total = _add_group(total, pairs >> 4, x_b, scale_b, sum_b, grid_b, BLOCK_N, BLOCK_M)
            scale_a, sum_a, grid_a = next_a, next_sum_a, next_grid_a
            scale_b, sum_b, grid_b = next_b, next_sum_b, next_grid_b
    else:
        for step in range(0, steps):
            pairs = tl.load(packed_ptrs + tl.cast(step, tl.int64) * out_features * 32)
            x_a, x_b = tl.load(x_ptrs + step * 64), tl.load(x_ptrs + step * 64 + 32)
            scale_a, sum_a, grid_a = _load_group(scale_ptrs, sum_ptrs, grid_ptrs, 2 * step, out_features)
            total = _add_group(total, pairs & 0xF, x_a, scale_a, sum_a, grid_a, BLOCK_N, BLOCK_M)
            scale_b, sum_b, grid_b = _load_group(scale_ptrs, sum_ptrs, grid_ptrs, 2 * step + 1, out_features)
            total = _add_group(total, pairs >> 4, x_b, scale_b, sum_b, grid_b, BLOCK_N, BLOCK_M)
    mask = (row < rows)[None, :] & (column < out_features)[:, None]
    finish(total, row[None, :], column[:, None], mask, bias_ptr, residual_ptr, residual_stride, out_ptr, out_features)


class W4A8Linear:
    """A layer of 4-bit weights and 8-bit activations; keeps the weights packed, and the bias in fp32.

    integers: (out_features, in_features) uint8, 0..15; scales, minimums: (out_features, ceil(in_features / 32)) fp16;
    bias: (out_features,) or None; dtype: of the activations.
    """

    def __init__(
        self,
        integers: Tensor,
        scales: Tensor,
        minimums: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        check_weight(integers, bias)
        if dtype not in ACTIVATION_DTYPES:
            raise InvalidArgumentError(f"dtype is {dtype}; float32, bfloat16 and float16 are supported")
        self.out_features, self.in_features = integers.shape
        self._dtype, self._out_dtype = dtype, results_dtype(out_dtype, dtype)
        self._steps = triton.cdiv(self.in_features, STEP)
        self._packed = pack_integers(integers, self._steps)
        self._grids = pack_grids(integers, scales, minimums, GROUP, self._steps)
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        check_call(x, residual, self.in_features, self.out_features, self._dtype, self._out_dtype)
        rows, groups = x.shape[0], 2 * self._steps
        out = torch.empty((rows, self.out_features), dtype=self._out_dtype, device=x.device)
        if rows == 0:
            return out
        sums = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
        integers, scales = quantize_rows(x, GROUP, groups, torch.int8, sums)
        tiles = _tiles_for(rows)
        programs = triton.cdiv(rows, tiles.block_m) * triton.cdiv(self.out_features, tiles.block_n)
        _linear_w4a8_kernel[(programs,)](
            integers, scales, sums, self._packed, self._grids, self._bias, residual, out,
            rows, self.out_features, self._steps, 0 if residual is None else residual.stride(0),
            AHEAD=_is_ahead(rows), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
        return out


def _is_ahead(rows: int) -> bool:
    """Whether scales are asked for ahead: larger tiles have no registers to keep them in, and more warps that wait."""
    return rows <= 32


def _tiles_for(rows: int) -> Tiles:
    # The sum is not cut, so few rows make few programs: each has to have much on its way.
    if rows <= 16:
        return Tiles(16, 64, 4, 16)
    if rows <= 32:
        return Tiles(32, 64, 4, 12)
    return Tiles(64, 64, 8, 4)


def variants() -> list[Variant]:
    """Few rows and many."""

    def make(name: str, rows: int) -> Variant:
        tiles = _tiles_for(rows)
        operands = {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "x_sums_ptr": "*fp32", "packed_ptr": "*u8"}
        outputs = {"grids_ptr": "*i32", "residual_ptr": "*bf16", "out_ptr": "*bf16"}
        names = ("rows", "out_features", "steps", "residual_stride")
        return Variant(
            name, _linear_w4a8_kernel, {**operands, **outputs, **dict.fromkeys(names, "i32")},
            {"bias_ptr": None, "AHEAD": _is_ahead(rows), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n},
            tiles.num_warps, tiles.num_stages, unaligned=frozenset({"rows", "steps"}),
        )  # fmt: skip

    return [make("1 to 16 rows, bf16", 16), make("17 to 32 rows, bf16", 32), make("many rows, bf16", 4096)]
