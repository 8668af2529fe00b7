"""A linear layer for few rows of 16-bit activations, where reading the weights is all that counts.

    out = x @ weight.T + bias + residual

A program's weights are the left operand of its products, so that few rows fit the short side of the matrix units, and
the sum over in_features is cut into parts until there are programs enough to keep the memory busy. The backend does not
use it: `make bench-gpu` measures it beside the GPU's own library, which is to decide between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.device import device_traits
from octavo_kernels.triton.linear_tiles import check_call, check_weight, finish, num_parts, sum_parts
from octavo_kernels.triton.paged_kv import TL_DTYPES
from octavo_kernels.triton.variant import Variant

MOST_ROWS = 64
_BLOCK_N = 64
_STEP = 128
_NUM_STAGES = 4


@triton.jit(do_not_specialize=["rows"])
def _linear_skinny_kernel(
    x_ptr,  # (rows, in_features)
    weight_ptr,  # (out_features, in_features)
    bias_ptr,  # (out_features,) fp32 or None
    residual_ptr,  # (rows, out_features) or None
    out_ptr,  # (rows, out_features), or fp32 (PARTS, rows, out_features) where PARTS > 1
    rows,
    in_features,
    out_features,
    x_stride,
    weight_stride,
    residual_stride,
    COMPUTE: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # whether in_features is a multiple of STEP
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
):
    row, column = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the ends rows and columns begin anew: loads need no masks for them, and what they give is not stored.
    x_row, weight_row = (row % rows).to(tl.int64), (column % out_features).to(tl.int64)
    depth = tl.arange(0, STEP)
    x_ptrs = x_ptr + x_row[None, :] * x_stride + depth[:, None]
    weight_ptrs = weight_ptr + weight_row[:, None] * weight_stride + depth[None, :]
    steps = tl.cdiv(in_features, STEP)
    first = tl.program_id(1) * tl.cdiv(steps, PARTS)
    last = tl.minimum(first + tl.cdiv(steps, PARTS), steps)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first, last):
        if IS_EVEN:
            x, weight = tl.load(x_ptrs + step * STEP), tl.load(weight_ptrs + step * STEP)
        else:
            inside = step * STEP + depth < in_features
            x = tl.load(x_ptrs + step * STEP, mask=inside[:, None], other=0.0)
            weight = tl.load(weight_ptrs + step * STEP, mask=inside[None, :], other=0.0)
        total = tl.dot(weight.to(COMPUTE), x.to(COMPUTE), total)
    mask = (row < rows)[None, :] & (column < out_features)[:, None]
    if PARTS > 1:
        part_ptr = out_ptr + tl.program_id(1).to(tl.int64) * rows * out_features
        tl.store(part_ptr + row.to(tl.int64)[None, :] * out_features + column[:, None], total, mask=mask)
        return
    finish(total, row[None, :], column[:, None], mask, bias_ptr, residual_ptr, residual_stride, out_ptr, out_features)


class SkinnyLinear:
    """A layer of 16-bit weights for at most MOST_ROWS rows; keeps the weight it was given, and the bias in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        check_weight(weight, bias)
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Linear`; x: (1 to MOST_ROWS, in_features)."""
        check_call(x, residual, self.in_features, self.out_features, self._weight.dtype)
        rows = x.shape[0]
        out = torch.empty((rows, self.out_features), dtype=x.dtype, device=x.device)
        traits = device_traits(x.device)
        # The interpreter's arithmetic in bf16 is that of the integers which hold the bits.
        compute = torch.float32 if traits.interpreted and x.dtype is torch.bfloat16 else x.dtype
        programs, steps = triton.cdiv(self.out_features, _BLOCK_N), triton.cdiv(self.in_features, _STEP)
        parts = num_parts(programs, rows, steps, traits.num_sms)
        target = out
        if parts > 1:
            target = torch.empty((parts, rows, self.out_features), dtype=torch.float32, device=x.device)
        _linear_skinny_kernel[(programs, parts)](
            x, self._weight, self._bias, residual, target,
            rows, self.in_features, self.out_features, x.stride(0), self._weight.stride(0),
            0 if residual is None else residual.stride(0),
            COMPUTE=TL_DTYPES[compute], PARTS=parts, IS_EVEN=self.in_features % _STEP == 0,
            BLOCK_M=_block_m(rows), BLOCK_N=_BLOCK_N, STEP=_STEP, num_warps=4, num_stages=_NUM_STAGES,
        )  # fmt: skip
        if parts > 1:
            sum_parts(target, None, self._bias, residual, out)
        return out


def _block_m(rows: int) -> int:
    block: int = triton.next_power_of_2(rows)
    return max(16, block)


def variants() -> list[Variant]:
    """1 to 16 rows, whole and in parts, and 64."""

    def make(rows: int, parts: int) -> Variant:
        outputs = {"residual_ptr": "*bf16", "out_ptr": "*fp32" if parts > 1 else "*bf16"}
        names = ("rows", "in_features", "out_features", "x_stride", "weight_stride", "residual_stride")
        return Variant(
            f"{rows} rows, {parts} parts, bf16", _linear_skinny_kernel,
            {"x_ptr": "*bf16", "weight_ptr": "*bf16", **outputs, **dict.fromkeys(names, "i32")},
            {"bias_ptr": None, "COMPUTE": TL_DTYPES[torch.bfloat16], "PARTS": parts, "IS_EVEN": True,
             "BLOCK_M": _block_m(rows), "BLOCK_N": _BLOCK_N, "STEP": _STEP},
            num_stages=_NUM_STAGES, unaligned=frozenset({"rows"}),
        )  # fmt: skip

    return [make(16, 1), make(16, 4), make(64, 1)]
