"""Linear layers of 8-bit floating-point weights and activations (e4m3).

Micikevicius et al., "FP8 formats for deep learning", 2022. Weights have one scale an output, activations one a row,
found as the layer is called. Products are summed in fp32:

    out = (x_scale * sum_k x8[k] * weight8[k]) * weight_scale + bias + residual

GPUs from compute capability 8.9 on multiply e4m3 themselves. Hopper's units keep fewer digits of a sum than fp32 has,
so their sums are brought to fp32 every 128 products (DeepSeek-V3 technical report, 2024, section 3.3.2). On older ones
the same stored numbers are decoded to fp16, exactly, and multiplied there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.device import device_traits
from octavo_kernels.triton.float8 import decode_e4m3
from octavo_kernels.triton.linear_tiles import finish, num_parts, sum_parts, tile_at, tiles_for
from octavo_kernels.triton.quantize_rows import quantize_rows
from octavo_kernels.triton.tiled_linear import TiledLinear, parts_of
from octavo_kernels.triton.variant import AMPERE, HOPPER, Variant

_STEP = 128
# `decode_e4m3` gives numbers divided by 256.
_DECODED_UNIT = 256.0 * 256.0


@triton.jit(do_not_specialize=["rows"])
def _linear_fp8_kernel(
    x_ptr,  # (rows, in_features) e4m3, or uint8 of its bits
    x_scales_ptr,  # (rows,)
    weight_ptr,  # (out_features, in_features), likewise
    weight_scales_ptr,  # (out_features,)
    bias_ptr,  # (out_features,) fp32 or None
    residual_ptr,  # (rows, out_features) or None
    out_ptr,  # (rows, out_features), or fp32 (PARTS, rows, out_features) where PARTS > 1
    rows,
    in_features,  # a multiple of STEP
    out_features,
    residual_stride,
    UNIT: tl.constexpr,
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
    steps = in_features // STEP
    first = tl.program_id(1) * tl.cdiv(steps, PARTS)
    last = tl.minimum(first + tl.cdiv(steps, PARTS), steps)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first, last):
        x = tl.load(x_ptrs + step * STEP)
        weight = tl.load(weight_ptrs + step * STEP)
        if x.dtype == tl.uint8:
            total = tl.dot(decode_e4m3(x), tl.trans(decode_e4m3(weight)), total)
        else:
            total = tl.dot(x, tl.trans(weight), total, max_num_imprecise_acc=STEP)
    total = total * UNIT
    mask = (row < rows)[:, None] & (column < out_features)[None, :]
    if PARTS > 1:
        part_ptr = out_ptr + tl.program_id(1).to(tl.int64) * rows * out_features
        tl.store(part_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :], total, mask=mask)
        return
    total = tl.load(x_scales_ptr + x_row)[:, None] * total
    total = total * tl.load(weight_scales_ptr + weight_row)[None, :]
    finish(total, row[:, None], column[None, :], mask, bias_ptr, residual_ptr, residual_stride, out_ptr, out_features)


class Fp8Linear(TiledLinear):
    """A layer of `Backend.fp8_linear`; keeps 8-bit weights with their scales."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weight, bias, dtype, out_dtype)
        self._padded = triton.cdiv(self.in_features, _STEP) * _STEP
        self._is_native = device_traits(weight.device).native_float8
        stored, scales = quantize_rows(weight.contiguous(), self._padded, 1, torch.float8_e4m3fn)
        self._weight, self._scales = self._operand(stored), scales.view(-1)

    def _compute(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        rows = x.shape[0]
        stored, scales = quantize_rows(x, self._padded, 1, torch.float8_e4m3fn)
        tiles = tiles_for(rows)
        programs = triton.cdiv(rows, tiles.block_m) * triton.cdiv(self.out_features, tiles.block_n)
        parts = num_parts(programs, rows, self._padded // _STEP, device_traits(x.device).num_sms)
        target = parts_of(out, parts, torch.float32)
        _linear_fp8_kernel[(programs, parts)](
            self._operand(stored), scales, self._weight, self._scales, self._bias, residual, target,
            rows, self._padded, self.out_features, 0 if residual is None else residual.stride(0),
            UNIT=1.0 if self._is_native else _DECODED_UNIT, PARTS=parts,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STEP=_STEP,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if parts > 1:
            sum_parts(target, (scales.view(-1), self._scales), self._bias, residual, out)

    def _operand(self, stored: Tensor) -> Tensor:
        """e4m3 as the kernel takes it: as it is, or its bits."""
        return stored if self._is_native else stored.view(torch.uint8)


def variants() -> list[Variant]:
    """Few rows in parts, some, many; each with and without the GPU's own e4m3."""

    def make(name: str, rows: int, parts: int, target: int) -> Variant:
        tiles = tiles_for(rows)
        kind, unit = ("*fp8e4nv", 1.0) if target >= HOPPER else ("*u8", _DECODED_UNIT)
        scales = {"x_scales_ptr": "*fp32", "weight_scales_ptr": "*fp32"}
        operands = {"x_ptr": kind, "weight_ptr": kind, **scales, "out_ptr": "*fp32" if parts > 1 else "*bf16"}
        sizes = {"rows": "i32", "in_features": "i32", "out_features": "i32", "residual_stride": "i32"}
        return Variant(
            name, _linear_fp8_kernel, {**operands, "residual_ptr": "*bf16", **sizes},
            {"bias_ptr": None, "UNIT": unit, "PARTS": parts,
             "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "STEP": _STEP},
            tiles.num_warps, tiles.num_stages, unaligned=frozenset({"rows"}), targets=(target,),
        )  # fmt: skip

    return [
        make(name, rows, parts, target)
        for target in (AMPERE, HOPPER)
        for name, rows, parts in (("1 to 16 rows in parts", 16, 4), ("64 rows", 64, 1), ("many rows", 4096, 1))
    ]
