"""Linear layers of 4-bit weights in groups of 32, whose activations keep their dtype.

    weight[n, k] = scale[n, k / 32] * integer[n, k] + minimum[n, k / 32], integers 0..15

Weights are made in registers, in fp32, rounded to the activations' dtype, and multiplied with sums in fp32. A program's
weights are the left operand: they may then stay in registers, and few activation rows fit the short side of the matrix
units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.int4 import Int4Weight
from octavo_kernels.triton.device import device_traits
from octavo_kernels.triton.int4_weight import STEP, pack_grids, pack_integers
from octavo_kernels.triton.linear_tiles import Tiles, finish, num_parts, sum_parts, tile_at
from octavo_kernels.triton.paged_kv import TL_DTYPES
from octavo_kernels.triton.tiled_linear import TiledLinear, parts_of
from octavo_kernels.triton.variant import Variant


@triton.jit(do_not_specialize=["rows"])
def _linear_w4a16_kernel(
    x_ptr,  # (rows, in_features)
    packed_ptr,  # (steps, out_features, 32) uint8
    grids_ptr,  # (groups, out_features) int32, see `pack_grids`
    bias_ptr,  # (out_features,) fp32 or None
    residual_ptr,  # (rows, out_features) or None
    out_ptr,  # (rows, out_features), or fp32 (PARTS, rows, out_features) where PARTS > 1
    rows,
    in_features,
    out_features,
    steps,  # even
    x_stride,
    residual_stride,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    TURN: tl.constexpr,  # steps whose loads are made together: 1 or 2
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile_m, tile_n = tile_at(tl.program_id(0), rows, out_features, BLOCK_M, BLOCK_N)
    row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the ends rows and columns begin anew: loads need no masks for them, and what they give is not stored.
    x_row, output = (row % rows).to(tl.int64), column % out_features
    depth = tl.arange(0, 32)
    x_ptrs = x_ptr + x_row[None, :] * x_stride + depth[:, None]
    packed_ptrs = packed_ptr + output.to(tl.int64)[:, None] * 32 + depth[None, :]
    turns = steps // TURN
    first = tl.program_id(1) * tl.cdiv(turns, PARTS)
    last = tl.minimum(first + tl.cdiv(turns, PARTS), turns)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for turn in range(first, last):
        for step in tl.static_range(TURN):
            at = turn * TURN + step
            pairs = tl.load(packed_ptrs + tl.cast(at, tl.int64) * out_features * 32)
            for half in tl.static_range(2):
                start = at * 64 + half * 32
                x = tl.load(x_ptrs + start, mask=(start + depth < in_features)[:, None], other=0.0).to(COMPUTE)
                grid = tl.load(grids_ptr + (2 * at + half) * out_features + output)
                scale = (grid & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                minimum = (grid >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                integers = (pairs & 0xF) if half == 0 else (pairs >> 4)
                weight = integers.to(tl.float32) * scale[:, None] + minimum[:, None]
                total = tl.dot(weight.to(COMPUTE), x, total, input_precision=PRECISION)
    mask = (row < rows)[None, :] & (column < out_features)[:, None]
    if PARTS > 1:
        part_ptr = out_ptr + tl.program_id(1).to(tl.int64) * rows * out_features
        tl.store(part_ptr + row.to(tl.int64)[None, :] * out_features + column[:, None], total, mask=mask)
        return
    finish(total, row[None, :], column[:, None], mask, bias_ptr, residual_ptr, residual_stride, out_ptr, out_features)


class W4A16Linear(TiledLinear):
    """A layer of `Backend.int4_linear`; keeps weights packed with their scales and minimums."""

    def __init__(
        self, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weight.integers, bias, dtype, out_dtype)
        self._steps = triton.cdiv(self.in_features, 2 * STEP) * 2
        self._packed = pack_integers(weight.integers, self._steps)
        self._grids = pack_grids(weight, self._steps)

    def _compute(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        rows = x.shape[0]
        traits, tiles = device_traits(x.device), _tiles_for(rows)
        # The interpreter's arithmetic in bf16 is that of the integers which hold the bits.
        compute = torch.float32 if traits.interpreted and x.dtype is torch.bfloat16 else x.dtype
        programs = triton.cdiv(rows, tiles.block_m) * triton.cdiv(self.out_features, tiles.block_n)
        turn = _turn(rows, compute)
        parts = num_parts(programs, rows, self._steps // turn, traits.num_sms)
        target = parts_of(out, parts, torch.float32)
        _linear_w4a16_kernel[(programs, parts)](
            x, self._packed, self._grids, self._bias, residual, target,
            rows, self.in_features, self.out_features, self._steps, x.stride(0),
            0 if residual is None else residual.stride(0),
            COMPUTE=TL_DTYPES[compute], PRECISION=_precision(compute), TURN=turn, PARTS=parts,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if parts > 1:
            sum_parts(target, None, self._bias, residual, out)


def _precision(compute: torch.dtype) -> str | None:
    """fp32 is multiplied as such, not rounded to tf32."""
    return "ieee" if compute is torch.float32 else None


def _turn(rows: int, compute: torch.dtype) -> int:
    """Few rows wait for weights: more of them are then asked for at once, where registers can hold them."""
    return 2 if rows <= 32 and compute.itemsize == 2 else 1


def _tiles_for(rows: int) -> Tiles:
    if rows <= 16:
        return Tiles(16, 64, 4, 5)
    if rows <= 32:
        return Tiles(32, 64, 4, 5)
    if rows <= 64:
        return Tiles(64, 64, 4, 4)
    return Tiles(128, 128, 8, 3)


def variants() -> list[Variant]:
    """Few rows in parts, some, many; and exact fp32."""

    def make(name: str, rows: int, kind: str, parts: int) -> Variant:
        tiles, dtype = _tiles_for(rows), {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
        operands = {"x_ptr": f"*{kind}", "packed_ptr": "*u8", "grids_ptr": "*i32"}
        outputs = {"residual_ptr": f"*{kind}", "out_ptr": "*fp32" if parts > 1 else f"*{kind}"}
        names = ("rows", "in_features", "out_features", "steps", "x_stride", "residual_stride")
        return Variant(
            name, _linear_w4a16_kernel, {**operands, **outputs, **dict.fromkeys(names, "i32")},
            {"bias_ptr": None, "COMPUTE": TL_DTYPES[dtype], "PRECISION": _precision(dtype),
             "TURN": _turn(rows, dtype), "PARTS": parts, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n},
            tiles.num_warps, tiles.num_stages, unaligned=frozenset({"rows", "steps"}),
        )  # fmt: skip

    return [
        make("1 to 16 rows in parts, bf16", 16, "bf16", 4),
        make("64 rows, bf16", 64, "bf16", 1),
        make("many rows, bf16", 4096, "bf16", 1),
        make("many rows, fp16", 4096, "fp16", 1),
        make("1 to 16 rows, fp32", 16, "fp32", 1),
    ]
