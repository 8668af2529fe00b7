"""Root mean square norm.

    out = x / sqrt(mean(x^2) + eps) * weight

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. A row, or a few short ones, is one program's: a row's
sum is made in an order that depends on its length alone, so its bits do not depend on its neighbours.
"""

from __future__ import annotations

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


def variants() -> list[Variant]:
    """A hidden state, the heads of queries and keys, and long rows."""

    def make(name: str, kind: str, n: int) -> Variant:
        per_program, block, num_warps = _tile(n)
        pointers = {"x_ptr": kind, "weight_ptr": kind, "out_ptr": kind}
        names = ("rows", "inner", "x_outer_stride", "x_inner_stride", "n")
        return Variant(
            name, _rms_norm_kernel, {**pointers, **dict.fromkeys(names, "i32"), "eps": "fp32"},
            {"ROWS": per_program, "BLOCK": block}, num_warps, unaligned=frozenset({"rows", "inner"}),
        )  # fmt: skip

    return [
        make("norm of 4,096, bf16", "*bf16", 4096),
        make("norm of heads of 128, fp16", "*fp16", 128),
        make("norm of 16,384, fp32", "*fp32", 16384),
    ]


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
