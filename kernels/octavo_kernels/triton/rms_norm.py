"""Root mean square norm, alone and with the addition to the residual stream before it.

    out = x / sqrt(mean(x^2) + eps) * weight

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. A row, or a few short ones, is one program's: a row's
sum is made in an order that depends on its length alone, so its bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.checks import LARGEST_ROW, check_activations, refuse
from octavo_kernels.triton.variant import Variant

# Elements that a program takes in at once where rows are short.
_PROGRAM_ELEMENTS = 2048


@triton.jit
def norm_scale(x, n, eps):
    """(rows, 1) reciprocal of the root mean square of fp32 rows (rows, BLOCK), zero beyond their n columns."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / n + eps)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,  # (outer, inner, n)
    weight_ptr,  # (n,)
    out_ptr,  # (outer * inner, n) contiguous
    rows,  # outer * inner
    inner,
    x_outer_stride,
    x_inner_stride,
    n,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    starts = (row // inner).to(tl.int64) * x_outer_stride + (row % inner).to(tl.int64) * x_inner_stride
    x = tl.load(x_ptr + starts[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    out = x * norm_scale(x, n, eps) * weight[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * n + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    x_ptr,  # (rows, n)
    residual_ptr,  # (rows, n), mutated
    weight_ptr,  # (n,)
    out_ptr,  # (rows, n) contiguous
    rows,
    x_stride,
    residual_stride,
    n,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    wide_row = row.to(tl.int64)[:, None]
    residual_ptrs = residual_ptr + wide_row * residual_stride + column[None, :]
    x = tl.load(x_ptr + wide_row * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    # The norm is of what is stored, so that it does not matter whether the two ops are fused.
    total = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, total, mask=mask)
    total = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    out = total * norm_scale(total, n, eps) * weight[None, :]
    tl.store(out_ptr + wide_row * n + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Backend.rms_norm`. Only the last dimension of x need be contiguous where it has at most three."""
    check_activations("x", x)
    n = x.shape[-1]
    _check_weight(x, weight)
    if x.dim() == 3:
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    else:
        if x.dim() != 2:
            x = x.contiguous()
        inner, outer_stride, inner_stride = 1, x.stride(-2) if x.dim() == 2 else n, 0
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = out.numel() // n
    per_program, block, num_warps = _tile(n)
    _rms_norm_kernel[(triton.cdiv(rows, per_program),)](
        x, weight, out, rows, inner, outer_stride, inner_stride, n, eps,
        ROWS=per_program, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x + residual)`, and residual becomes the sum, rounded to its dtype. Mutates residual.

    x, residual: (T, n) of one dtype, the last dimension contiguous; weight: (n,). Returns a new (T, n).
    """
    check_activations("x", x)
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype is not x.dtype or residual.stride(1) != 1:
        refuse("residual", residual, f"{tuple(x.shape)} of {x.dtype}, two-dimensional, is needed")
    _check_weight(x, weight)
    rows, n = x.shape
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    per_program, block, num_warps = _tile(n)
    _add_rms_norm_kernel[(triton.cdiv(rows, per_program),)](
        x, residual, weight, out, rows, x.stride(0), residual.stride(0), n, eps,
        ROWS=per_program, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return out


def variants() -> list[Variant]:
    """A hidden state, the heads of queries and keys, and the fused form."""
    strides = {"rows": "i32", "n": "i32", "eps": "fp32"}

    def plain(name: str, kind: str, n: int) -> Variant:
        per_program, block, num_warps = _tile(n)
        pointers = {"x_ptr": kind, "weight_ptr": kind, "out_ptr": kind}
        layout = {"inner": "i32", "x_outer_stride": "i32", "x_inner_stride": "i32"}
        constants = {"ROWS": per_program, "BLOCK": block}
        unaligned = frozenset({"rows", "inner"})
        return Variant(
            name, _rms_norm_kernel, {**pointers, **layout, **strides}, constants, num_warps, unaligned=unaligned
        )

    def fused(name: str, kind: str, n: int) -> Variant:
        per_program, block, num_warps = _tile(n)
        pointers = {"x_ptr": kind, "residual_ptr": kind, "weight_ptr": kind, "out_ptr": kind}
        layout = {"x_stride": "i32", "residual_stride": "i32"}
        constants = {"ROWS": per_program, "BLOCK": block}
        unaligned = frozenset({"rows"})
        return Variant(
            name, _add_rms_norm_kernel, {**pointers, **layout, **strides}, constants, num_warps, unaligned=unaligned
        )

    makers: list[tuple[Callable[[str, str, int], Variant], str, str, int]] = [
        (plain, "norm of 4,096, bf16", "*bf16", 4096),
        (plain, "norm of heads of 128, fp16", "*fp16", 128),
        (plain, "norm of 16,384, fp32", "*fp32", 16384),
        (fused, "add and norm of 4,096, bf16", "*bf16", 4096),
        (fused, "add and norm of 8,192, bf16", "*bf16", 8192),
    ]
    return [make(name, kind, n) for make, name, kind, n in makers]


def _check_weight(x: Tensor, weight: Tensor) -> None:
    n = x.shape[-1]
    if weight.shape != (n,) or weight.stride(0) != 1 or weight.dtype not in (x.dtype, torch.float32):
        refuse("weight", weight, f"a contiguous ({n},) of {x.dtype} or float32 is needed")
    if n > LARGEST_ROW:
        refuse("x", x, f"rows of at most {LARGEST_ROW} are supported")


def _tile(n: int) -> tuple[int, int, int]:
    """Rows a program, columns, warps: by the length of a row alone."""
    block = triton.next_power_of_2(n)
    rows = max(1, min(16, _PROGRAM_ELEMENTS // block))
    return rows, block, max(4, min(32, block // 512))
