"""From the projections to attention in one pass: norms of queries and keys, rotary positions, K and V to their slots.

A program takes one head of a few tokens and writes a query to a tensor of its own, or a key or a value to the pool. The
projections are not changed, so programs need no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.backend import LayerKV
from octavo_kernels.triton.checks import check_activations, check_column, refuse
from octavo_kernels.triton.paged_kv import padded_head_dim
from octavo_kernels.triton.rms_norm import norm_scale
from octavo_kernels.triton.rotary import check_angles
from octavo_kernels.triton.variant import Variant
from octavo_kernels.triton.write_kv import BLOCK_T, store_tile


@triton.jit
def _turned(
    head_ptrs,  # (T, 1) to the first number of a head
    exists,
    position,
    weight_ptr,  # (HEAD_DIM,) or None
    eps,
    cos_sin_ptr,
    max_positions,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF_DIM: tl.constexpr,
):
    """A head of some tokens, normed where there is a weight, and rotated: (T, BLOCK_D) of the head's dtype."""
    dtype = head_ptrs.dtype.element_ty
    dim = tl.arange(0, BLOCK_D)
    is_turned, is_first = dim < 2 * HALF_DIM, dim < HALF_DIM
    partner = tl.where(is_first, dim + HALF_DIM, dim - HALF_DIM)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    x = tl.load(head_ptrs + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(head_ptrs + partner[None, :], mask=inside & is_turned[None, :], other=0.0).to(tl.float32)
    if weight_ptr is not None:
        scale = norm_scale(x, HEAD_DIM, eps)
        weight = tl.load(weight_ptr + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        partner_weight = tl.load(weight_ptr + partner, mask=is_turned, other=0.0).to(tl.float32)
        # Rounded, as the norm's result is where the ops stand apart.
        x = (x * scale * weight[None, :]).to(dtype).to(tl.float32)
        y = (y * scale * partner_weight[None, :]).to(dtype).to(tl.float32)
    is_known = exists & (position >= 0) & (position < max_positions)
    angle_ptrs = (
        cos_sin_ptr + position.to(tl.int64)[:, None] * (2 * HALF_DIM) + tl.where(is_first, dim, partner)[None, :]
    )
    mask = is_known[:, None] & is_turned[None, :]
    cos = tl.load(angle_ptrs, mask=mask, other=1.0)
    sin = tl.load(angle_ptrs + HALF_DIM, mask=mask, other=0.0)
    return (x * cos + y * tl.where(is_first[None, :], -sin, sin)).to(dtype)


@triton.jit(do_not_specialize=["num_tokens", "max_positions", "num_slots"])
def _rotary_write_kv_kernel(
    qkv_ptr,  # (tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q_ptr,  # (tokens, HEADS, HEAD_DIM) contiguous
    positions_ptr,  # (tokens,)
    slots_ptr,  # (tokens,)
    cos_sin_ptr,  # (max_positions, 2 * HALF_DIM)
    q_weight_ptr,  # (HEAD_DIM,) or None
    k_weight_ptr,  # (HEAD_DIM,) or None
    k_tiles_ptr,
    v_tiles_ptr,
    k_scales_ptr,
    v_scales_ptr,
    num_tokens,
    max_positions,
    num_slots,
    eps,
    token_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_TRANSPOSED: tl.constexpr,
    V_TRANSPOSED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    exists = token < num_tokens
    dim = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    head_ptrs = qkv_ptr + token.to(tl.int64)[:, None] * token_stride + part * HEAD_DIM
    position = tl.load(positions_ptr + token, mask=exists, other=0)
    slots = tl.load(slots_ptr + token, mask=exists, other=-1)
    is_stored = (slots >= 0) & (slots < num_slots)
    if part < HEADS:
        q = _turned(
            head_ptrs, exists, position, q_weight_ptr, eps, cos_sin_ptr, max_positions, HEAD_DIM, BLOCK_D, HALF_DIM
        )  # fmt: skip
        out_ptrs = q_ptr + token.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + part * HEAD_DIM + dim[None, :]
        tl.store(out_ptrs, q, mask=inside)
    elif part < HEADS + KV_HEADS:
        head = part - HEADS
        if QUANTIZED:
            k_scales_ptr += head * scale_head_stride
        k = _turned(
            head_ptrs, exists, position, k_weight_ptr, eps, cos_sin_ptr, max_positions, HEAD_DIM, BLOCK_D, HALF_DIM
        )  # fmt: skip
        store_tile(
            k, k_tiles_ptr + head * head_stride, k_scales_ptr, slots, is_stored, block_stride, scale_block_stride,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, K_TRANSPOSED, QUANTIZED, FLOAT8,
        )  # fmt: skip
    else:
        head = part - HEADS - KV_HEADS
        if QUANTIZED:
            v_scales_ptr += head * scale_head_stride
        v = tl.load(head_ptrs + dim[None, :], mask=inside, other=0.0)
        store_tile(
            v, v_tiles_ptr + head * head_stride, v_scales_ptr, slots, is_stored, block_stride, scale_block_stride,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, V_TRANSPOSED, QUANTIZED, FLOAT8,
        )  # fmt: skip


def rotary_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv: LayerKV,
    slots: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`Backend.rotary_write_kv`. A token whose slot is outside of the pool is not stored. qkv is not mutated; the
    queries are a new contiguous tensor."""
    check_activations("qkv", qkv)
    kv_heads, head_dim, block_size = kv.k.shape[1:]
    is_dense = qkv.dim() == 3 and (qkv.shape[1] == 1 or qkv.stride(1) == head_dim)
    if not is_dense or qkv.shape[1] <= 2 * kv_heads or qkv.shape[2] != head_dim:
        refuse("qkv", qkv, f"(tokens, heads + 2 * {kv_heads}, {head_dim}), strided in dim 0 alone, is needed")
    if kv.k_scales is None and kv.k.dtype is not qkv.dtype:
        refuse("qkv", qkv, f"{kv.k.dtype}, the dtype of K and V, is needed")
    tokens, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    check_column("positions", positions, tokens, torch.int32)
    check_column("slots", slots, tokens, torch.int32)
    half = check_angles(cos_sin, head_dim)
    for weight in norms or ():
        check_column("norms", weight, head_dim, weight.dtype)
        check_activations("norms", weight)
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    is_float8 = kv.k.dtype is torch.float8_e4m3fn
    k_tiles, v_tiles = (x.view(torch.uint8) if is_float8 else x for x in (kv.k, kv.v))
    scale_strides = (0, 0) if kv.k_scales is None else kv.k_scales.stride()[:2]
    q_weight, k_weight = norms or (None, None)
    _rotary_write_kv_kernel[(triton.cdiv(tokens, BLOCK_T), heads + 2 * kv_heads)](
        qkv, q, positions, slots, cos_sin, q_weight, k_weight, k_tiles, v_tiles, kv.k_scales, kv.v_scales,
        tokens, cos_sin.shape[0], kv.k.shape[0] * block_size, eps, qkv.stride(0), *k_tiles.stride()[:2], *scale_strides,
        HEADS=heads, KV_HEADS=kv_heads, HALF_DIM=half, BLOCK_T=BLOCK_T, HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim), BLOCK_SIZE=block_size,
        K_TRANSPOSED=kv.k.stride(2) != 1, V_TRANSPOSED=kv.v.stride(2) == 1,
        QUANTIZED=kv.k_scales is not None, FLOAT8=is_float8, num_warps=4,
        enable_fp_fusion=False,  # so that stored bits are by the rules of `Backend.write_kv`
    )  # fmt: skip
    return q


def variants() -> list[Variant]:
    """Heads of 128 as they are, with norms, and quantized to each dtype."""

    def make(name: str, stored: str, *, has_norms: bool = False) -> Variant:
        is_quantized = stored != "bf16"
        pointers = {
            "qkv_ptr": "bf16",
            "q_ptr": "bf16",
            "positions_ptr": "i32",
            "slots_ptr": "i32",
            "cos_sin_ptr": "fp32",
        }
        pointers |= {"k_tiles_ptr": stored, "v_tiles_ptr": stored}
        weights, scales = ("q_weight_ptr", "k_weight_ptr"), ("k_scales_ptr", "v_scales_ptr")
        pointers |= dict.fromkeys(weights, "bf16") if has_norms else {}
        pointers |= dict.fromkeys(scales, "fp32") if is_quantized else {}
        strides = ("token_stride", "block_stride", "head_stride", "scale_block_stride", "scale_head_stride")
        numbers = {**dict.fromkeys(("num_tokens", "max_positions", "num_slots", *strides), "i32"), "eps": "fp32"}
        constants = {
            **({} if has_norms else dict.fromkeys(weights)), **({} if is_quantized else dict.fromkeys(scales)),
            "HEADS": 32, "KV_HEADS": 8, "HALF_DIM": 64, "BLOCK_T": BLOCK_T, "HEAD_DIM": 128, "BLOCK_D": 128,
            "BLOCK_SIZE": 16, "K_TRANSPOSED": False, "V_TRANSPOSED": is_quantized, "QUANTIZED": is_quantized,
            "FLOAT8": stored == "u8",
        }  # fmt: skip
        return Variant(
            name,
            _rotary_write_kv_kernel,
            {arg: f"*{kind}" for arg, kind in pointers.items()} | numbers,
            constants,
            unaligned=frozenset({"num_tokens", "max_positions", "num_slots"}),
        )

    return [
        make("head 128, bf16", "bf16"),
        make("head 128, bf16, norms", "bf16", has_norms=True),
        make("head 128, bf16 to int8", "i8"),
        make("head 128, bf16 to e4m3", "u8"),
    ]
