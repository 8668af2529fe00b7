"""Storing K and V of new tokens in their slots, quantized where the pool is.

A program brings a few tokens' K or V of one head into the pool. Quantized, it takes the head's largest magnitude by the
bits of its numbers, in whose order a NaN is the largest, and rounds to int8 or e4m3 by the rules of `Backend.write_kv`,
so that the stored bits are those of every other backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.backend import LayerKV
from octavo_kernels.triton.checks import check_activations, check_column, refuse
from octavo_kernels.triton.float8 import encode_e4m3
from octavo_kernels.triton.paged_kv import check_tiles, padded_head_dim
from octavo_kernels.triton.variant import Variant

BLOCK_T = 16


@triton.jit
def quantize_heads(x, FLOAT8: tl.constexpr):
    """Stored values of rows of fp32 (T, D), int8 or e4m3's bits as uint8, and their scales (T,)."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    is_finite, is_zero = bits < 0x7F800000, bits < 0x0D800000  # below 2^-100
    is_scaled = is_finite & (bits >= 0x0D800000)
    magnitude = tl.where(is_scaled, bits.to(tl.float32, bitcast=True), 1.0)
    limit = tl.full(magnitude.shape, 448.0 if FLOAT8 else 127.0, tl.float32)
    scale = tl.where(is_scaled, tl.div_rn(magnitude, limit), tl.where(is_zero, 0.0, float("nan")))
    scaled = tl.where(is_scaled[:, None], x * tl.div_rn(limit, magnitude)[:, None], 0.0)
    # Adding 1.5 * 2^23 rounds to an integer.
    stored = encode_e4m3(scaled) if FLOAT8 else ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    return stored, scale


@triton.jit
def store_tile(
    x,
    tile_ptr,
    scales_ptr,
    slots,
    exists,
    block_stride,
    scale_block_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Stores one head of a few tokens, x (T, BLOCK_D), in `slots` (T,), where they exist.

    tile_ptr, scales_ptr: of the head's tile and scales in block 0.
    """
    dims = tl.arange(0, BLOCK_D)
    blocks, places = (slots // BLOCK_SIZE).to(tl.int64), slots % BLOCK_SIZE
    if QUANTIZED:
        x, scales = quantize_heads(x.to(tl.float32), FLOAT8)
        tl.store(scales_ptr + blocks * scale_block_stride + places, scales, mask=exists)
    starts = tile_ptr + blocks * block_stride
    if TRANSPOSED:
        # Consecutive positions lie together, and so do the threads that write them.
        pointers = (starts + places)[None, :] + dims[:, None] * BLOCK_SIZE
        tl.store(pointers, tl.trans(x), mask=exists[None, :] & (dims[:, None] < HEAD_DIM))
    else:
        pointers = (starts + places * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(pointers, x, mask=exists[:, None] & (dims[None, :] < HEAD_DIM))


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_tiles_ptr,
    v_tiles_ptr,
    k_scales_ptr,
    v_scales_ptr,
    num_tokens,
    num_slots,
    k_row_stride,
    v_row_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_TRANSPOSED: tl.constexpr,
    V_TRANSPOSED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """K (`program_id(2)` 0) or V (1) of head `program_id(1)` of BLOCK_T tokens."""
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims = tl.arange(0, BLOCK_D)
    exists = token < num_tokens
    inside = exists[:, None] & (dims[None, :] < HEAD_DIM)
    slots = tl.load(slots_ptr + token, mask=exists, other=-1)
    exists = (slots >= 0) & (slots < num_slots)
    rows = token.to(tl.int64)[:, None]
    if QUANTIZED:
        k_scales_ptr += head * scale_head_stride
        v_scales_ptr += head * scale_head_stride
    if tl.program_id(2) == 0:
        x = tl.load(k_ptr + rows * k_row_stride + (head * HEAD_DIM + dims)[None, :], mask=inside, other=0.0)
        store_tile(
            x, k_tiles_ptr + head * head_stride, k_scales_ptr, slots, exists, block_stride, scale_block_stride,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, K_TRANSPOSED, QUANTIZED, FLOAT8,
        )  # fmt: skip
    else:
        x = tl.load(v_ptr + rows * v_row_stride + (head * HEAD_DIM + dims)[None, :], mask=inside, other=0.0)
        store_tile(
            x, v_tiles_ptr + head * head_stride, v_scales_ptr, slots, exists, block_stride, scale_block_stride,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, V_TRANSPOSED, QUANTIZED, FLOAT8,
        )  # fmt: skip


def write_kv(k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
    """See `Backend.write_kv`. A token whose slot is outside of the pool is not stored. Mutates kv."""
    check_tiles(kv)
    kv_heads, head_dim = kv.k.shape[1:3]
    tokens = slots.shape[0]
    for name, x in (("k", k), ("v", v)):
        check_activations(name, x)
        if x.shape != (tokens, kv_heads, head_dim) or (x.stride(1) != head_dim and kv_heads > 1):
            refuse(name, x, f"({tokens}, {kv_heads}, {head_dim}), strided in dim 0 alone, is needed")
        if kv.k_scales is None and x.dtype is not kv.k.dtype:
            refuse(name, x, f"kv's dtype, {kv.k.dtype}, is needed")
    check_column("slots", slots, tokens, torch.int32)
    if tokens == 0:
        return
    is_float8 = kv.k.dtype is torch.float8_e4m3fn
    k_tiles, v_tiles = (x.view(torch.uint8) if is_float8 else x for x in (kv.k, kv.v))
    scale_strides = (0, 0) if kv.k_scales is None else kv.k_scales.stride()[:2]
    _write_kv_kernel[(triton.cdiv(tokens, BLOCK_T), kv_heads, 2)](
        k,
        v,
        slots,
        k_tiles,
        v_tiles,
        kv.k_scales,
        kv.v_scales,
        tokens,
        kv.k.shape[0] * kv.k.shape[3],
        k.stride(0),
        v.stride(0),
        *k_tiles.stride()[:2],
        *scale_strides,
        BLOCK_T=BLOCK_T,
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_SIZE=kv.k.shape[3],
        K_TRANSPOSED=kv.k.stride(2) != 1,
        V_TRANSPOSED=kv.v.stride(2) == 1,
        QUANTIZED=kv.k_scales is not None,
        FLOAT8=is_float8,
        num_warps=4,
        enable_fp_fusion=False,  # products are rounded before they are rounded to 8 bits
    )


def variants() -> list[Variant]:
    """As it is, and quantized to each dtype."""
    return [_variant("bf16", "bf16"), _variant("fp32", "fp32"), _variant("bf16", "i8"), _variant("bf16", "u8")]


def _variant(given: str, stored: str) -> Variant:
    is_quantized = stored in ("i8", "u8")
    pointers = {"k_ptr": given, "v_ptr": given, "k_tiles_ptr": stored, "v_tiles_ptr": stored, "slots_ptr": "i32"}
    scales = ("k_scales_ptr", "v_scales_ptr")
    if is_quantized:
        pointers |= dict.fromkeys(scales, "fp32")
    integers = [
        "num_tokens",
        "num_slots",
        "k_row_stride",
        "v_row_stride",
        "block_stride",
        "head_stride",
        "scale_block_stride",
        "scale_head_stride",
    ]
    return Variant(
        f"head 128, {given}, block 16, {stored}",
        _write_kv_kernel,
        {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(integers, "i32"),
        {
            **({} if is_quantized else dict.fromkeys(scales)),
            "BLOCK_T": BLOCK_T,
            "HEAD_DIM": 128,
            "BLOCK_D": 128,
            "BLOCK_SIZE": 16,
            "K_TRANSPOSED": False,
            "V_TRANSPOSED": is_quantized,
            "QUANTIZED": is_quantized,
            "FLOAT8": stored == "u8",
        },
        unaligned=frozenset({"num_tokens", "num_slots"}),
    )
