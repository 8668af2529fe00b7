"""Gated activation: silu(gate) * up, silu(x) = x / (1 + exp(-x)).

Shazeer, "GLU Variants Improve Transformer", 2020. Element by element, in fp32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.checks import check_activations, refuse
from octavo_kernels.triton.variant import Variant

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # (rows, 2 * n), gate first
    out_ptr,  # (rows, n) contiguous
    row_stride,
    n,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    gate_ptrs = gate_up_ptr + row * row_stride + column
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + n, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * n + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`Backend.silu_mul`."""
    check_activations("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 != 0:
        refuse("gate_up", gate_up, "(tokens, 2 * n) is needed")
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, n), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        _silu_mul_kernel[(rows, triton.cdiv(n, _BLOCK))](gate_up, out, gate_up.stride(0), n, BLOCK=_BLOCK)
    return out


def variants() -> list[Variant]:
    """One a dtype."""
    return [
        Variant(
            f"gated activation, {kind[1:]}",
            _silu_mul_kernel,
            {"gate_up_ptr": kind, "out_ptr": kind, "row_stride": "i32", "n": "i32"},
            {"BLOCK": _BLOCK},
        )
        for kind in ("*bf16", "*fp32")
    ]
