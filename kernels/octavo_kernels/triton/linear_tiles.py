"""What the quantized linear layers share: tiles, the order of programs, parts along the sum, and the end of a layer.

Few rows make few tiles, too few to keep all of a GPU's memory channels busy. The sum over in_features is then cut into
parts, which are added, first to last, by a second kernel. Where a program runs is never a matter of chance: the same
shapes give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.triton.checks import refuse
from octavo_kernels.triton.variant import Variant

# Rows up to which the sum may be cut: beyond, there are tiles enough.
_MOST_ROWS_IN_PARTS = 64
# A part has at least as many steps, or its loads would not overlap.
_FEWEST_STEPS = 4
_SUM_BLOCK = 256


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: a program's rows and outputs, its warps, and the loads under way at once."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tiles_for(rows: int) -> Tiles:
    """For so many rows of operands of 8 bits, 128 deep. At most 96 KiB of shared memory, which all targets have."""
    if rows <= 16:
        return Tiles(16, 64, 4, 5)
    if rows <= 32:
        return Tiles(32, 64, 4, 5)
    if rows <= 64:
        return Tiles(64, 64, 4, 4)
    if rows <= 256:
        return Tiles(64, 128, 4, 4)
    return Tiles(128, 128, 8, 3)


def num_parts(tiles: int, rows: int, steps: int, num_sms: int) -> int:
    """Parts to cut a sum of `steps` steps into, where without them `tiles` programs would run."""
    if rows > _MOST_ROWS_IN_PARTS:
        return 1
    return max(1, min(2 * num_sms // tiles, steps // _FEWEST_STEPS, 16))


@triton.jit
def tile_at(program, rows, out_features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tile of rows, tile of outputs) of a program: eight tiles of rows take turns, so that they share weights."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    band = program // (8 * tiles_n)
    height = tl.minimum(tiles_m - 8 * band, 8)
    inside = program % (8 * tiles_n)
    return 8 * band + inside % height, inside // height


@triton.jit
def finish(total, row, column, mask, bias_ptr, residual_ptr, residual_stride, out_ptr, out_features):
    """Adds bias and residual to fp32 totals and stores them; row, column: of one shape with total when broadcast."""
    if bias_ptr is not None:
        total = total + tl.load(bias_ptr + column, mask=column < out_features, other=0.0)
    wide_row = row.to(tl.int64)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + wide_row * residual_stride + column, mask=mask, other=0.0)
        total = total + residual.to(tl.float32)
    tl.store(out_ptr + wide_row * out_features + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _sum_parts_kernel(
    parts_ptr,  # (PARTS, rows, out_features) fp32 or int32
    x_scales_ptr,  # (rows,) or None
    weight_scales_ptr,  # (out_features,) or None
    bias_ptr,  # (out_features,) fp32 or None
    residual_ptr,  # (rows, out_features) or None
    out_ptr,  # (rows, out_features)
    rows,
    out_features,
    residual_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < out_features
    part_ptr = parts_ptr + row.to(tl.int64) * out_features + column
    total = tl.zeros((BLOCK,), parts_ptr.dtype.element_ty)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * tl.cast(rows, tl.int64) * out_features, mask=mask, other=0)
    total = total.to(tl.float32)
    if x_scales_ptr is not None:
        total = tl.load(x_scales_ptr + row) * total
        total = total * tl.load(weight_scales_ptr + column, mask=mask, other=0.0)
    finish(total, row, column, mask, bias_ptr, residual_ptr, residual_stride, out_ptr, out_features)


def sum_parts(
    parts: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """out = sum of parts, times the scales of rows and outputs, plus bias, plus residual. Mutates out.

    parts: (n, rows, out_features) fp32 or int32; scales: (rows,) and (out_features,) fp32.
    """
    rows, out_features = out.shape
    x_scales, weight_scales = (None, None) if scales is None else scales
    _sum_parts_kernel[(rows, triton.cdiv(out_features, _SUM_BLOCK))](
        parts, x_scales, weight_scales, bias, residual, out, rows, out_features,
        0 if residual is None else residual.stride(0),
        PARTS=parts.shape[0], BLOCK=_SUM_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def check_weight(weight: Tensor, bias: Tensor | None) -> None:
    """Raises InvalidArgumentError unless weight is a matrix and bias fits it."""
    if weight.dim() != 2 or weight.numel() == 0:
        refuse("weight", weight, "(out_features, in_features), neither of them 0, is needed")
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse("bias", bias, f"a ({weight.shape[0]},) is needed")


def check_call(
    x: Tensor,
    residual: Tensor | None,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Raises InvalidArgumentError for activations that a layer was not made for.

    out_dtype: of results, None for dtype.
    """
    if x.dtype is not dtype or x.dim() != 2 or x.shape[1] != in_features or x.stride(1) != 1:
        refuse("x", x, f"(rows, {in_features}) of {dtype}, the last dimension contiguous, is needed")
    if residual is None:
        return
    if out_dtype not in (None, dtype):
        raise InvalidArgumentError(f"a layer that gives {out_dtype} takes no residual of {dtype}")
    if residual.shape != (x.shape[0], out_features) or residual.dtype is not dtype or residual.stride(1) != 1:
        refuse("residual", residual, f"{(x.shape[0], out_features)} of {dtype} is needed")


def variants() -> list[Variant]:
    """Parts of 8-bit layers, and of layers without scales at the end."""
    sizes = {"rows": "i32", "out_features": "i32", "residual_stride": "i32"}
    unaligned = frozenset({"rows"})
    ends = {"out_ptr": "*bf16", "residual_ptr": "*bf16", **sizes}
    return [
        Variant(
            "8 parts of integers, bf16", _sum_parts_kernel,
            {"parts_ptr": "*i32", "x_scales_ptr": "*fp32", "weight_scales_ptr": "*fp32", "bias_ptr": "*fp32", **ends},
            {"PARTS": 8, "BLOCK": _SUM_BLOCK}, unaligned=unaligned,
        ),
        Variant(
            "8 parts, bf16", _sum_parts_kernel, {"parts_ptr": "*fp32", **ends},
            {"x_scales_ptr": None, "weight_scales_ptr": None, "bias_ptr": None, "PARTS": 8, "BLOCK": _SUM_BLOCK},
            unaligned=unaligned,
        ),
    ]  # fmt: skip
