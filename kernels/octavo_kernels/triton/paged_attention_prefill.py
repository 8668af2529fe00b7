"""Paged attention of prefill chunks and decodes together, in one launch (Dao, FlashAttention-2, 2023).

A program attends with the query heads of a KV head, for a few consecutive tokens of a sequence, to all that they see:
its rows are token by token, head by head, so that K and V are read once for a group. Which tokens those are it finds
in the batch's columns on the device; the number of programs is a bound that follows from shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, LayerKV
from octavo_kernels.triton.attention_form import AttentionForm
from octavo_kernels.triton.attention_tile import LOG2_E, attend_tile, block_ids, query
from octavo_kernels.triton.device import LARGE_SHARED_MEMORY, SMALL_SHARED_MEMORY, device_traits
from octavo_kernels.triton.paged_kv import TL_DTYPES, compute_dtype, padded_head_dim, paged_tiles
from octavo_kernels.triton.variant import HOPPER, Variant


@triton.jit
def _find_sequence(query_starts_ptr, num_sequences, tile, TOKENS: tl.constexpr):
    """The last sequence s with starts[s] // TOKENS + s <= tile: those are the numbers of the sequences' first tiles.

    A sequence of n tokens has at most n // TOKENS + 1 tiles, so that no number serves two; some serve none.
    """
    low, high = 0, num_sequences
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["sliding_window", "num_sequences", "min_queries", "table_stride"])
def _paged_attention_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    tables_ptr,
    query_starts_ptr,
    positions_ptr,
    sinks_ptr,
    out_ptr,
    scale,
    v_unit,
    soft_cap,
    sliding_window,
    num_sequences,
    min_queries,
    q_row_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_TRANSPOSED: tl.constexpr,
    V_TRANSPOSED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """BLOCK_M // HEADS tokens of a sequence with HEADS of a KV head's query heads, `program_id(0)` times as many on.

    Sequences of fewer than min_queries tokens are left alone. The last tiles, which see most, come first.
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    kv_head = tl.program_id(0) // (GROUP // HEADS)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = _find_sequence(query_starts_ptr, num_sequences, tile, TOKENS)
    start = tl.load(query_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - start
    first_token = (tile - (start // TOKENS + sequence)) * TOKENS
    if (first_token >= num_queries) | (num_queries < min_queries):
        return
    last_token = tl.minimum(first_token + TOKENS, num_queries) - 1
    first_position = tl.load(positions_ptr + start) + first_token
    end = first_position + last_token - first_token + 1

    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = first_token + row // HEADS
    heads = tl.program_id(0) * HEADS + row % HEADS
    exists = (row < TOKENS * HEADS) & (token <= last_token)
    inside = exists[:, None] & (dims[None, :] < HEAD_DIM)
    q_rows = q_ptr + (start + token).to(tl.int64) * q_row_stride + heads * HEAD_DIM
    q, scales = query(tl.load(q_rows[:, None] + dims[None, :], mask=inside, other=0.0), scale, COMPUTE)
    positions = tl.minimum(first_position + row // HEADS, end - 1)[:, None]

    if sinks_ptr is not None:
        maximum = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
    state = (maximum, total, tl.zeros((BLOCK_M, BLOCK_D), tl.float32))
    if QUANTIZED:
        k_scales_ptr += kv_head * scale_head_stride
        v_scales_ptr += kv_head * scale_head_stride
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    places = (k_ptr, v_ptr, block_stride, k_scales_ptr, v_scales_ptr, scale_block_stride)
    limits = (end, sliding_window, soft_cap)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    num_blocks = tl.cdiv(end, BLOCK_SIZE)
    # With a window every tile is masked, for it has few. Without, those that all rows see whole are not.
    begin_tile = tl.maximum(first_position - sliding_window + 1, 0) // BLOCK_N if HAS_WINDOW else 0
    whole_tiles = begin_tile if HAS_WINDOW else (first_position + 1) // BLOCK_N
    # Ids of blocks are read one tile ahead, so that no load in the loop waits for another.
    ids = block_ids(table_ptr, begin_tile * BLOCK_N + tl.arange(0, BLOCK_N), num_blocks, BLOCK_SIZE)
    for tile in range(begin_tile, whole_tiles):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        state = attend_tile(
            state, q, scales, places, ids, columns, positions, limits, False, HAS_WINDOW, HAS_CAP,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, K_TRANSPOSED, V_TRANSPOSED, QUANTIZED, COMPUTE,
        )  # fmt: skip
        ids = block_ids(table_ptr, columns + BLOCK_N, num_blocks, BLOCK_SIZE)
    for tile in range(whole_tiles, tl.cdiv(end, BLOCK_N)):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        state = attend_tile(
            state, q, scales, places, ids, columns, positions, limits, True, HAS_WINDOW, HAS_CAP,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, K_TRANSPOSED, V_TRANSPOSED, QUANTIZED, COMPUTE,
        )  # fmt: skip
        ids = block_ids(table_ptr, columns + BLOCK_N, num_blocks, BLOCK_SIZE)

    maximum, total, result = state
    if QUANTIZED:
        result *= v_unit
    out_rows = out_ptr + ((start + token).to(tl.int64) * NUM_HEADS + heads) * HEAD_DIM
    tl.store(out_rows[:, None] + dims[None, :], (result / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class PrefillConfig:
    """The shape of a program: rows (tokens times heads of a group), positions of a tile, and how Triton compiles it.

    All were chosen by what they compile to (`compile_table`): the fewest instructions a position without a spill, but
    for head sizes that are no power of two, of which programs of few rows and in fp32 may spill two registers.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(
    rows: int, head_dim: int, dtype: torch.dtype, *, is_quantized: bool, shared_memory: int
) -> PrefillConfig:
    """rows: that the longest sequence has; dtype: of the matrix product's operands; shared_memory: bytes that a program
    can have.

    float32 is multiplied without tensor cores, by programs small enough for their registers.
    """
    padded, is_large = padded_head_dim(head_dim), shared_memory >= LARGE_SHARED_MEMORY
    if dtype is torch.float32:
        return PrefillConfig(16, 32, 8, 3) if padded <= 128 else PrefillConfig(16, 16, 8, 2)
    if padded > 128:
        if is_quantized or rows <= 32:
            return PrefillConfig(32, 32, 4, 2)
        return PrefillConfig(128 if is_large else 64, 32, 8, 2)
    if rows <= 32:
        return PrefillConfig(32, 32, 4, 3)
    if is_quantized:
        return PrefillConfig(128, 32, 8, 2) if is_large else PrefillConfig(64, 64, 8, 2)
    if is_large:
        return PrefillConfig(128, 128, 8, 2) if head_dim == padded else PrefillConfig(128, 64, 8, 3)
    return PrefillConfig(128, 64 if padded <= 64 else 32, 8, 3)


def heads_together(group: int, rows: int) -> int:
    """Of a KV head's `group` query heads, how many share a program of `rows` rows: the most that divide the group."""
    return max(n for n in range(1, min(group, rows) + 1) if group % n == 0)


def paged_attention_prefill(
    q: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    min_queries: int = 1,
) -> None:
    """Attention of the sequences that own at least min_queries tokens in this pass. Mutates out, in their rows alone.

    q: (T, num_heads, head_dim), may be strided in dim 0; out: (T, num_heads * head_dim) contiguous; sinks:
    (num_heads,) or None. For the other arguments see `Backend.paged_attention`. Never waits for the device.
    """
    traits = device_traits(q.device)
    tiles = paged_tiles(kv, traits)
    num_tokens, heads, head_dim = q.shape
    sequences = batch.block_tables.shape[0]
    group = heads // kv.k.shape[1]
    compute = compute_dtype(q.dtype, kv.k.dtype, interpreted=traits.interpreted)
    max_queries = num_tokens if batch.max_queries is None else batch.max_queries
    config = prefill_config(
        max_queries * group,
        head_dim,
        compute,
        is_quantized=tiles.k_scales is not None,
        shared_memory=traits.shared_memory,
    )
    together = heads_together(group, config.block_m)
    num_tiles = num_tokens // (config.block_m // together) + sequences
    _paged_attention_prefill_kernel[(heads // together, num_tiles)](
        q,
        tiles.k,
        tiles.v,
        tiles.k_scales,
        tiles.v_scales,
        batch.block_tables,
        batch.query_starts,
        batch.positions,
        sinks,
        out,
        scale * tiles.unit * float(LOG2_E.value),
        tiles.v_unit,
        (soft_cap or 0.0) * float(LOG2_E.value),
        sliding_window or 0,
        sequences,
        min_queries,
        q.stride(0),
        *tiles.k.stride()[:2],
        *tiles.scale_strides,
        batch.block_tables.stride(0),
        NUM_HEADS=heads,
        GROUP=group,
        HEADS=together,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=soft_cap is not None,
        **tiles.constants,
        COMPUTE=TL_DTYPES[compute],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def variants() -> list[Variant]:
    """Every head size with each stored dtype and set of options, in bf16 for few rows and for many, and in fp32, where
    both are one; fp16 and a larger block once."""
    groups = {64: 4, 80: 1, 96: 3, 128: 4, 256: 2}
    everything = ("window", "cap", "sinks")
    options: tuple[tuple[str, ...], ...] = ((), ("window",), everything)
    crossed = [
        AttentionForm(head_dim, torch.bfloat16, group, stored=stored, options=chosen)
        for head_dim, group in groups.items()
        for chosen in options
        for stored in (None, "i8", "u8", "fp8e4nv")
    ]
    single = [
        AttentionForm(head_dim, torch.float32, group, options=chosen)
        for head_dim, group in groups.items()
        for chosen in options
    ]
    others = [
        AttentionForm(80, torch.float16, group=1),
        AttentionForm(128, torch.bfloat16, group=4, block_size=32, options=everything),
    ]
    return [
        *(_variant(form, target, _MANY) for form in (*crossed, *single, *others) for target in form.targets),
        *(_variant(form, target, 4) for form in crossed for target in form.targets),
    ]


_MANY = 4096


def _variant(form: AttentionForm, target: int, max_queries: int) -> Variant:
    config = prefill_config(
        max_queries * form.group,
        form.head_dim,
        form.compute,
        is_quantized=form.is_quantized,
        shared_memory=LARGE_SHARED_MEMORY if target == HOPPER else SMALL_SHARED_MEMORY,
    )
    together = heads_together(form.group, config.block_m)
    is_padded = form.head_dim != padded_head_dim(form.head_dim)
    variant = form.variant(
        _paged_attention_prefill_kernel,
        {"HEADS": together, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        targets=(target,),
        unaligned=frozenset({"num_sequences", "min_queries"}),
        note="" if max_queries == _MANY else f"{max_queries} tokens",
    )
    # The compiler rounds registers down to what lets one more program run, at the cost of a spill of two.
    return replace(variant, spills=is_padded and (max_queries != _MANY or form.dtype is torch.float32))
