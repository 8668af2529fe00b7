"""Paged attention of one query token a sequence, its context split over programs (Flash-Decoding; Dao et al., 2023).

One program attends with the query heads of a KV head to a part of a sequence's context and leaves an unnormalized
result; a second kernel joins the parts. K and V are read once, by one program: the work is bound by memory, and the
rows that pad the query heads to the height of a tensor core's tile cost nothing. How many parts there are follows from
shapes alone; how the context is cut follows from its length, which the programs read: a captured graph serves all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, LayerKV
from octavo_kernels.triton.attention_form import AttentionForm
from octavo_kernels.triton.attention_tile import LOG2_E, attend_tile, block_ids, query
from octavo_kernels.triton.device import device_traits
from octavo_kernels.triton.paged_kv import TL_DTYPES, compute_dtype, padded_head_dim, paged_tiles
from octavo_kernels.triton.variant import Variant

# A program shorter than this waits for memory more than it reads: its first tile is there after a microsecond.
MIN_TILES = 2
# Programs for each multiprocessor, of which two or three fit at once: what the last wave leaves idle is small then.
PROGRAMS_PER_SM = 8
# Parts that the second kernel joins at a time.
JOINED = 16


# Numbers that change from launch to launch are not compiled into a kernel, so that few kernels serve all.
@triton.jit(do_not_specialize=["sliding_window", "num_parts", "table_stride"])
def _paged_attention_decode_kernel(
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
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    scale,
    v_unit,
    soft_cap,
    sliding_window,
    num_parts,
    q_row_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    K_TRANSPOSED: tl.constexpr,
    V_TRANSPOSED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Part `program_id(2)` of sequence `program_id(0)` with BLOCK_H query heads of a KV head.

    Sequences that own no token or more than one are left alone. Writes the result to out, normalized, unless SPLIT.
    """
    sequence, part = tl.program_id(0), tl.program_id(2)
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // HEAD_TILES
    token = tl.load(query_starts_ptr + sequence)
    if tl.load(query_starts_ptr + sequence + 1) - token != 1:
        return
    end = tl.load(positions_ptr + token) + 1
    first = tl.maximum(end - sliding_window, 0) if HAS_WINDOW else 0
    first_tile, end_tile = first // BLOCK_N, tl.cdiv(end, BLOCK_N)
    part_tiles = tl.maximum(tl.cdiv(end_tile - first_tile, num_parts), MIN_TILES)
    begin_tile = first_tile + part * part_tiles
    end_tile = tl.minimum(end_tile, begin_tile + part_tiles)
    if begin_tile >= end_tile:
        return

    row = tl.program_id(1) % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + row
    inside = (row[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    q_row = q_ptr + token.to(tl.int64) * q_row_stride
    q = tl.load(q_row + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    q, scales = query(q, scale, COMPUTE)

    if QUANTIZED:
        k_scales_ptr += kv_head * scale_head_stride
        v_scales_ptr += kv_head * scale_head_stride
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    places = (k_ptr, v_ptr, block_stride, k_scales_ptr, v_scales_ptr, scale_block_stride)
    limits = (end, sliding_window, soft_cap)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    num_blocks = tl.cdiv(end, BLOCK_SIZE)
    maximum = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    state = (maximum, total, tl.zeros((BLOCK_H, BLOCK_D), tl.float32))
    # Ids of blocks are read one tile ahead, so that no load in the loop waits for another.
    ids = block_ids(table_ptr, begin_tile * BLOCK_N + tl.arange(0, BLOCK_N), num_blocks, BLOCK_SIZE)
    for tile in range(begin_tile, end_tile):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        state = attend_tile(
            state, q, scales, places, ids, columns, end - 1, limits, True, HAS_WINDOW, HAS_CAP,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, K_TRANSPOSED, V_TRANSPOSED, QUANTIZED, COMPUTE,
        )  # fmt: skip
        ids = block_ids(table_ptr, columns + BLOCK_N, num_blocks, BLOCK_SIZE)

    maximum, total, result = state
    if QUANTIZED:
        result *= v_unit
    if SPLIT:
        index = (sequence.to(tl.int64) * NUM_HEADS + heads) * num_parts + part
        tl.store(parts_ptr + index[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
        tl.store(maxima_ptr + index, maximum, mask=row < GROUP)
        tl.store(sums_ptr + index, total, mask=row < GROUP)
    else:
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + heads, mask=row < GROUP, other=0.0).to(tl.float32) * LOG2_E
            new_maximum = tl.maximum(maximum, sinks)
            shrink = tl.exp2(maximum - new_maximum)
            total = total * shrink + tl.exp2(sinks - new_maximum)
            result *= shrink[:, None]
        out_row = out_ptr + token.to(tl.int64) * NUM_HEADS * HEAD_DIM
        result = (result / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_row + heads[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["sliding_window", "num_parts"])
def _join_parts_kernel(
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    query_starts_ptr,
    positions_ptr,
    sinks_ptr,
    out_ptr,
    sliding_window,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MIN_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Joins the parts of sequence `program_id(0)`, head `program_id(1)`, those that the first kernel wrote."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts_ptr + sequence)
    if tl.load(query_starts_ptr + sequence + 1) - token != 1:
        return
    end = tl.load(positions_ptr + token) + 1
    first = tl.maximum(end - sliding_window, 0) if HAS_WINDOW else 0
    tiles = tl.cdiv(end, BLOCK_N) - first // BLOCK_N
    used = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, num_parts), MIN_TILES))

    dims = tl.arange(0, BLOCK_D)
    index = (sequence.to(tl.int64) * NUM_HEADS + head) * num_parts
    if sinks_ptr is not None:
        maximum = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total = 1.0
    else:
        maximum = float("-inf")
        total = 0.0
    result = tl.zeros((BLOCK_D,), tl.float32)
    for begin in range(0, used, BLOCK_P):
        part = begin + tl.arange(0, BLOCK_P)
        exists = part < used
        maxima = tl.load(maxima_ptr + index + part, mask=exists, other=float("-inf"))
        sums = tl.load(sums_ptr + index + part, mask=exists, other=0.0)
        parts = tl.load(
            parts_ptr + (index + part)[:, None] * HEAD_DIM + dims[None, :],
            mask=exists[:, None] & (dims[None, :] < HEAD_DIM),
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(maxima - new_maximum)
        total = total * shrink + tl.sum(weights * sums, 0)
        result = result * shrink + tl.sum(parts * weights[:, None], 0)
        maximum = new_maximum
    out = out_ptr + (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(out, (result / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True)
class DecodeConfig:
    """The shape of a program: query heads and positions of a tile, and what Triton compiles it for."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_config(group: int, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """Chosen by the bytes of tiles of K and V: two of each are on their way at any time, in at most 76 KiB, so that two
    programs share a multiprocessor and what is on its way is more than bandwidth times latency.

    dtype: of the matrix product's operands. float32 is multiplied without tensor cores and takes more registers.
    """
    block_h = min(max(triton.next_power_of_2(group), 16), 32)
    padded = padded_head_dim(head_dim)
    if dtype is torch.float32:
        return DecodeConfig(16, 32, 8, 2)
    return DecodeConfig(block_h, 64 if padded <= 128 else 32, 4, 3)


def part_count(programs: int, num_sms: int, max_context: int, block_n: int) -> int:
    """How many parts a context is cut into: enough to fill the GPU, none shorter than MIN_TILES of the longest one.

    programs: that there are without cutting
    """
    wanted = -(-PROGRAMS_PER_SM * num_sms // max(programs, 1))
    return max(1, min(wanted, max_context // (MIN_TILES * block_n)))


def decode_workspace_size(sequences: int, heads: int, head_dim: int, parts: int) -> int:
    """Numbers of fp32 that `paged_attention_decode` needs for the results of its parts; 0 for one part."""
    return _padded_rows(sequences * heads * parts) * (head_dim + 2) if parts > 1 else 0


def _padded_rows(rows: int) -> int:
    """Rows of results of parts that have room. A multiple of 4, so that what lies behind them begins at a multiple of
    16 bytes whatever the batch: by that the compiler tells kernels apart."""
    return -(-rows // 4) * 4


def paged_attention_decode(
    q: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    parts: int | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Attention of the sequences that own one query token in this pass. Mutates out, in their rows alone.

    q: (T, num_heads, head_dim), may be strided in dim 0; out: (T, num_heads * head_dim) contiguous; sinks: (num_heads,)
    or None. For the other arguments see `Backend.paged_attention`. parts: into how many a context is cut, None to
    choose; workspace: fp32, of at least `decode_workspace_size` numbers, None to allocate. Never waits for the device.
    """
    traits = device_traits(q.device)
    tiles = paged_tiles(kv, traits)
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = kv.k.shape[1]
    sequences, max_blocks = batch.block_tables.shape
    group = heads // kv_heads
    compute = compute_dtype(q.dtype, kv.k.dtype, interpreted=traits.interpreted)
    config = decode_config(group, head_dim, compute)
    programs = kv_heads * triton.cdiv(group, config.block_h)
    if parts is None:
        max_context = max_blocks * tiles.block_size
        if sliding_window is not None:
            max_context = min(max_context, sliding_window + config.block_n)
        parts = part_count(sequences * programs, traits.num_sms, max_context, config.block_n)
    split_results: tuple[Tensor | None, ...] = (None, None, None)
    if parts > 1:
        size = decode_workspace_size(sequences, heads, head_dim, parts)
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.float32, device=q.device)
        rows = _padded_rows(sequences * heads * parts)
        split_results = workspace[:size].split((rows * head_dim, rows, rows))
    window = sliding_window or 0
    _paged_attention_decode_kernel[(sequences, programs, parts)](
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
        *split_results,
        scale * tiles.unit * float(LOG2_E.value),
        tiles.v_unit,
        (soft_cap or 0.0) * float(LOG2_E.value),
        window,
        parts,
        q.stride(0),
        *tiles.k.stride()[:2],
        *tiles.scale_strides,
        batch.block_tables.stride(0),
        NUM_HEADS=heads,
        GROUP=group,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        MIN_TILES=MIN_TILES,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=soft_cap is not None,
        **tiles.constants,
        SPLIT=parts > 1,
        COMPUTE=TL_DTYPES[compute],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if parts > 1:
        _join_parts_kernel[(sequences, heads)](
            *split_results,
            batch.query_starts,
            batch.positions,
            sinks,
            out,
            window,
            parts,
            NUM_HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=padded_head_dim(head_dim),
            BLOCK_N=config.block_n,
            BLOCK_P=JOINED,
            MIN_TILES=MIN_TILES,
            HAS_WINDOW=sliding_window is not None,
            num_warps=4,
        )


def variants() -> list[Variant]:
    """Every head size and dtype, each option somewhere, and both ways of reading e4m3."""
    forms = [
        AttentionForm(64, torch.bfloat16, group=4),
        AttentionForm(80, torch.float16, group=1),
        AttentionForm(96, torch.bfloat16, group=3),
        AttentionForm(128, torch.bfloat16, group=4),
        AttentionForm(128, torch.bfloat16, group=4, block_size=32, options=("window", "cap", "sinks")),
        AttentionForm(128, torch.float16, group=32, options=("sinks",)),
        AttentionForm(128, torch.float32, group=4),
        AttentionForm(256, torch.bfloat16, group=8, options=("window", "cap")),
        AttentionForm(256, torch.float32, group=2),
        AttentionForm(128, torch.bfloat16, group=4, stored="i8"),
        AttentionForm(128, torch.bfloat16, group=4, stored="u8"),
        AttentionForm(128, torch.bfloat16, group=4, stored="fp8e4nv"),
        AttentionForm(256, torch.bfloat16, group=8, stored="fp8e4nv"),
    ]
    made = [_decode_variant(form, split=True) for form in forms]
    return [*made, _decode_variant(forms[3], split=False), _join_variant(64), _join_variant(256)]


def _decode_variant(form: AttentionForm, split: bool) -> Variant:
    config = decode_config(form.group, form.head_dim, form.compute)
    return form.variant(
        _paged_attention_decode_kernel,
        {"BLOCK_H": config.block_h, "BLOCK_N": config.block_n, "MIN_TILES": MIN_TILES, "SPLIT": split},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        targets=form.targets,
        unaligned=frozenset({"num_parts"}),
        absent=() if split else ("parts_ptr", "maxima_ptr", "sums_ptr"),
        note="" if split else "one part",
    )


def _join_variant(head_dim: int) -> Variant:
    pointers = {"parts": "fp32", "maxima": "fp32", "sums": "fp32", "query_starts": "i32", "positions": "i32"}
    return Variant(
        f"head {head_dim}, bf16",
        _join_parts_kernel,
        {f"{key}_ptr": f"*{kind}" for key, kind in pointers.items()}
        | {"out_ptr": "*bf16", "sliding_window": "i32", "num_parts": "i32"},
        {
            "sinks_ptr": None,
            "NUM_HEADS": 32,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded_head_dim(head_dim),
            "BLOCK_N": 64,
            "BLOCK_P": JOINED,
            "MIN_TILES": MIN_TILES,
            "HAS_WINDOW": False,
        },
        num_warps=4,
        unaligned=frozenset({"sliding_window", "num_parts"}),
    )
