"""Rotary positions: pairs (i, i + rotary_dim / 2) of each head are turned by an angle that the token's position sets.

    out[i] = x[i] cos - x[i + r / 2] sin        out[i + r / 2] = x[i + r / 2] cos + x[i] sin

Su et al., "RoFormer", 2021, in the order of pairs of GPT-NeoX. `rotary_write_kv` has the turn of K and its storing in
one pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.triton.checks import check_activations, check_column, refuse
from octavo_kernels.triton.variant import Variant

# Pairs that a program turns.
_PROGRAM_PAIRS = 1024


@triton.jit
def load_angles(cos_sin_ptr, position, max_positions, pair, mask, HALF_DIM: tl.constexpr):
    """(cosines, sines) of a token's pairs; the identity for a position that does not exist."""
    mask = mask & (position >= 0) & (position < max_positions)
    angle_ptr = cos_sin_ptr + position.to(tl.int64) * (2 * HALF_DIM) + pair
    return tl.load(angle_ptr, mask=mask, other=1.0), tl.load(angle_ptr + HALF_DIM, mask=mask, other=0.0)


@triton.jit
def turn_in_place(x_ptrs, cos, sin, mask, HALF_DIM: tl.constexpr):
    """Turns the pairs whose first halves x_ptrs point to; all of one shape when broadcast."""
    a = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptrs, (a * cos - b * sin).to(x_ptrs.dtype.element_ty), mask=mask)
    tl.store(x_ptrs + HALF_DIM, (b * cos + a * sin).to(x_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_positions"])
def _rotary_kernel(
    x_ptr,  # (tokens, heads, head_dim), mutated
    positions_ptr,  # (tokens,)
    cos_sin_ptr,  # (max_positions, 2 * HALF_DIM)
    heads,
    max_positions,
    token_stride,
    head_stride,
    HALF_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    cos, sin = load_angles(
        cos_sin_ptr, tl.load(positions_ptr + token), max_positions, pair, pair < HALF_DIM, HALF_DIM
    )  # fmt: skip
    x_ptrs = x_ptr + token * token_stride + head.to(tl.int64)[:, None] * head_stride + pair[None, :]
    mask = (head < heads)[:, None] & (pair < HALF_DIM)[None, :]
    turn_in_place(x_ptrs, cos[None, :], sin[None, :], mask, HALF_DIM)


def rotary(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """`Backend.rotary`. A token at a position that the table has not is left alone."""
    check_activations("x", x)
    if x.dim() != 3:
        refuse("x", x, "(tokens, heads, head_dim) is needed")
    tokens, heads, head_dim = x.shape
    check_column("positions", positions, tokens, torch.int32)
    half = check_angles(cos_sin, head_dim)
    if x.numel() == 0 or half == 0:
        return
    block, per_program = _tile(half, heads)
    _rotary_kernel[(tokens, triton.cdiv(heads, per_program))](
        x, positions, cos_sin, heads, cos_sin.shape[0], x.stride(0), x.stride(1),
        HALF_DIM=half, HEADS=per_program, BLOCK=block, num_warps=4,
    )  # fmt: skip


def check_angles(cos_sin: Tensor, head_dim: int) -> int:
    """Half of the dimensions that a table of cosines and sines turns. Raises InvalidArgumentError for a wrong table."""
    if cos_sin.dtype is not torch.float32 or cos_sin.dim() != 2 or not cos_sin.is_contiguous():
        refuse("cos_sin", cos_sin, "a contiguous (max_positions, rotary_dim) of float32 is needed")
    rotary_dim = cos_sin.shape[1]
    if rotary_dim > head_dim or rotary_dim % 2 != 0:
        raise InvalidArgumentError(f"rotary_dim is {rotary_dim}; it must be even and at most head_dim, {head_dim}")
    return rotary_dim // 2


def variants() -> list[Variant]:
    """Heads of 128 and of 80, of which 80 are padded to 64 pairs."""

    def make(kind: str, head_dim: int, heads: int) -> Variant:
        block, per_program = _tile(head_dim // 2, heads)
        sizes = {"heads": "i32", "max_positions": "i32", "token_stride": "i32", "head_stride": "i32"}
        return Variant(
            f"heads of {head_dim}, {kind}",
            _rotary_kernel,
            {"x_ptr": f"*{kind}", "positions_ptr": "*i32", "cos_sin_ptr": "*fp32", **sizes},
            {"HALF_DIM": head_dim // 2, "HEADS": per_program, "BLOCK": block},
            unaligned=frozenset({"heads", "max_positions"}),
        )

    return [make("bf16", 128, 40), make("fp16", 80, 32)]


def _tile(half: int, heads: int) -> tuple[int, int]:
    """Pairs of a head, padded, and heads a program."""
    block = triton.next_power_of_2(half)
    return block, min(max(1, _PROGRAM_PAIRS // block), triton.next_power_of_2(heads))
