"""Quantizes activations to 8 bits, integers or e4m3, with one scale for each group of neighbours of a row.

    scale = max |x| / limit        stored = round(x * (limit / max |x|))

limit: 127 for integers, 448, the largest number, for e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022).
What is below 2^-100 altogether becomes 0 with scale 0; what holds a NaN or an infinity becomes 0 with scale NaN.
Compiled without contraction of multiplications and additions: integers are those of `reference.quantize_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.device import device_traits
from octavo_kernels.triton.float8 import encode_e4m3
from octavo_kernels.triton.variant import AMPERE, HOPPER, Variant

_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Elements that a program takes in at once.
_BLOCK = 2048
_INTEGERS, _E4M3, _E4M3_BITS = 0, 1, 2


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # (rows, n)
    out_ptr,  # (rows, groups * group), zero behind n
    scales_ptr,  # (rows, groups)
    x_stride,
    n,
    groups,
    group,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    largest = tl.zeros((GROUPS, BLOCK), tl.float32)
    for start in range(0, group, BLOCK):
        inside = start + tl.arange(0, BLOCK)
        column = index[:, None] * group + inside[None, :]
        mask = (inside < group)[None, :] & (column < n)
        x = tl.abs(tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.where(x == x, x, float("inf")))
    magnitude = tl.max(largest, axis=1)
    is_zero, is_finite = magnitude < 7.888609052210118e-31, magnitude < float("inf")  # 2^-100
    divisor = tl.where(is_zero, 1.0, magnitude)
    scale = tl.where(is_finite, tl.div_rn(magnitude, LIMIT), float("nan"))
    inverse = tl.where(is_zero, 0.0, tl.div_rn(tl.full((GROUPS,), LIMIT, tl.float32), divisor))
    tl.store(scales_ptr + row * groups + index, tl.where(is_zero, 0.0, scale), mask=index < groups)
    for start in range(0, group, BLOCK):
        inside = start + tl.arange(0, BLOCK)
        column = index[:, None] * group + inside[None, :]
        stored = (inside < group)[None, :] & (index < groups)[:, None]
        x = tl.load(x_ptr + row * x_stride + column, mask=stored & (column < n), other=0.0).to(tl.float32)
        value = tl.where(is_finite[:, None], x, 0.0) * inverse[:, None]
        if KIND == 0:
            # In 1.5 * 2^23 the last digit is 1: the sum rounds to nearest even.
            code = ((value + 12582912.0) - 12582912.0).to(tl.int8)
        elif KIND == 1:
            code = value.to(tl.float8e4nv)
        else:
            code = encode_e4m3(value)
        tl.store(out_ptr + row * groups * group + column, code, mask=stored)


def quantize_rows(x: Tensor, group: int, num_groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stored values and scales of every group of each row.

    x: (rows, n) of a float dtype, the last dimension contiguous, n at most num_groups * group; dtype: int8 or
    float8_e4m3fn. Returns (rows, num_groups * group) of dtype, zero behind n, and (rows, num_groups) fp32.
    """
    rows = x.shape[0]
    out = torch.empty((rows, num_groups * group), dtype=dtype, device=x.device)
    scales = torch.empty((rows, num_groups), dtype=torch.float32, device=x.device)
    if rows == 0:
        return out, scales
    kind, stored = _INTEGERS, out
    if dtype is torch.float8_e4m3fn:
        kind = _E4M3 if device_traits(x.device).native_float8 else _E4M3_BITS
        stored = out if kind == _E4M3 else out.view(torch.uint8)
    block = min(_BLOCK, triton.next_power_of_2(group))
    per_program = min(_BLOCK // block, triton.next_power_of_2(num_groups))
    _quantize_rows_kernel[(rows, triton.cdiv(num_groups, per_program))](
        x, stored, scales, x.stride(0), x.shape[1], num_groups, group,
        LIMIT=_LIMITS[dtype], KIND=kind, GROUPS=per_program, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out, scales


def variants() -> list[Variant]:
    """Whole rows and groups of 64; e4m3 by instruction and by bits, of activations and of weights."""

    def make(name: str, x: str, out: str, kind: int, groups: int, block: int, targets: tuple[int, ...]) -> Variant:
        sizes = dict.fromkeys(("x_stride", "n", "groups", "group"), "i32")
        signature = {"x_ptr": x, "out_ptr": out, "scales_ptr": "*fp32", **sizes}
        limit = _LIMITS[torch.int8 if kind == _INTEGERS else torch.float8_e4m3fn]
        constants = {"LIMIT": limit, "KIND": kind, "GROUPS": groups, "BLOCK": block}
        unaligned = frozenset({"groups"})
        return Variant(name, _quantize_rows_kernel, signature, constants, unaligned=unaligned, targets=targets)

    return [
        make("integers, whole rows, bf16", "*bf16", "*i8", _INTEGERS, 1, _BLOCK, (AMPERE, HOPPER)),
        make("integers, groups of 64, bf16", "*bf16", "*i8", _INTEGERS, 32, 64, (AMPERE, HOPPER)),
        make("e4m3, bf16", "*bf16", "*fp8e4nv", _E4M3, 1, _BLOCK, (HOPPER,)),
        make("e4m3, fp32", "*fp32", "*fp8e4nv", _E4M3, 1, _BLOCK, (HOPPER,)),
        make("e4m3 by bits, bf16", "*bf16", "*u8", _E4M3_BITS, 1, _BLOCK, (AMPERE,)),
        make("e4m3 by bits, fp32", "*fp32", "*u8", _E4M3_BITS, 1, _BLOCK, (AMPERE,)),
    ]
