"""What both attention kernels do with one tile of K and V: load it through the block table, and attend to it.

Softmax is kept online (Milakov and Gimelshein, 2018; Dao, FlashAttention-2, 2023), in base 2: a row has its largest
score so far, the sum of its powers of two relative to it, and the weighted sum of V.

What lies behind a context may be NaN, and nothing times NaN is not nothing: scores of K are masked, and V is masked as
it is loaded. Where a tile is stored transposed (`KVLayout`), a mask by position would break its loads into single
numbers, so nothing masks them: blocks are whole, and table entries behind the last one read block 0. Only quantized V
is stored so here, and its numbers are finite, written or not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.float8 import decode_e4m3

LOG2_E = tl.constexpr(1.4426950408889634)
# Probabilities are multiplied by this before they meet quantized V and its scales: so large are the largest stored
# values, and without it small scales would be subnormal in fp16.
V_UNIT = tl.constexpr(64.0)


@triton.jit
def block_ids(table_ptr, columns, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Ids of the blocks that hold the positions `columns` (N,); 0 behind the last of `num_blocks`.

    The condition is on whole blocks, so that the compiler sees that BLOCK_SIZE neighbours are alike.
    """
    index = columns // BLOCK_SIZE
    return tl.load(table_ptr + index, mask=index < num_blocks, other=0)


@triton.jit
def load_k(
    k_ptr,
    blocks,
    block_stride,
    columns,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """The (BLOCK_D, N) tile of K, as stored. k_ptr: of the head's tile in block 0."""
    dims = tl.arange(0, BLOCK_D)
    starts = k_ptr + blocks.to(tl.int64) * block_stride
    if TRANSPOSED:
        pointers = (starts + columns % BLOCK_SIZE)[None, :] + dims[:, None] * BLOCK_SIZE
    else:
        pointers = (starts + columns % BLOCK_SIZE * HEAD_DIM)[None, :] + dims[:, None]
    if HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=dims[:, None] < HEAD_DIM, other=0.0)


@triton.jit
def load_v(
    v_ptr,
    blocks,
    block_stride,
    columns,
    end,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """The (N, BLOCK_D) tile of V, as stored; 0 at positions from `end` on, if MASKED and not TRANSPOSED.

    v_ptr: as k_ptr of `load_k`.
    """
    dims = tl.arange(0, BLOCK_D)
    starts = v_ptr + blocks.to(tl.int64) * block_stride
    if TRANSPOSED:
        pointers = (starts + columns % BLOCK_SIZE)[:, None] + dims[None, :] * BLOCK_SIZE
    else:
        pointers = (starts + columns % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
    if MASKED and not TRANSPOSED:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=columns[:, None] < end, other=0.0)
        return tl.load(pointers, mask=(columns[:, None] < end) & (dims[None, :] < HEAD_DIM), other=0.0)
    if HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=dims[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def widen(stored, COMPUTE: tl.constexpr):
    """A tile in the dtype of the matrix product. A tile of uint8 is one of e4m3, and comes out divided by 256."""
    if stored.dtype == tl.uint8:
        return decode_e4m3(stored).to(COMPUTE)
    return stored.to(COMPUTE)


@triton.jit
def power_of_two(rows):
    """Of every row of fp32, the largest power of two that is no larger than its largest magnitude; at least 2^-100."""
    largest = tl.maximum(tl.max(tl.abs(rows), 1), 7.888609052210118e-31)
    return (largest.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def query(q, scale, COMPUTE: tl.constexpr):
    """Rows of q (M, D) in the dtype of the matrix product, and what their scores are to be multiplied by.

    bf16 becomes fp16 over a power of two, a row its own, which loses nothing that counts beside the row's largest.
    """
    if q.dtype == tl.bfloat16 and tl.float16 == COMPUTE:
        wide = q.to(tl.float32)
        unit = power_of_two(wide)
        operand = (wide / unit[:, None]).to(tl.float16)
        scale = (unit * scale)[:, None]
    else:
        operand = q.to(COMPUTE)
    return operand, scale


@triton.jit
def soften(scores, cap):
    """`cap * tanh(scores / cap)` of scores in base 2 by a cap in base 2, without overflow on the way."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.0 * LOG2_E) / cap))


@triton.jit
def attend_tile(
    state,
    q,
    scales,
    places,
    ids,
    columns,
    positions,
    limits,
    MASKED: tl.constexpr,
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
    """Attends to one tile of K and V. Returns the state: largest score (M,), sum (M,) and result (M, BLOCK_D).

    q, scales: of `query`; places: pointers to a head's K, V and their scales in block 0, each two before their blocks'
    stride; ids, columns: blocks and positions of the tile (N,); positions: of the rows, (M, 1) or one for all; limits:
    end, sliding window and soft cap; MASKED: whether rows may see less than the whole tile.
    """
    maximum, total, result = state
    k_ptr, v_ptr, block_stride, k_scales_ptr, v_scales_ptr, scale_block_stride = places
    end, sliding_window, soft_cap = limits
    k = load_k(k_ptr, ids, block_stride, columns, HEAD_DIM, BLOCK_D, BLOCK_SIZE, K_TRANSPOSED)
    scores = tl.dot(q, widen(k, COMPUTE), input_precision="ieee")
    # What scales all scores of a row alike is left to the multiply-add before the power, where nothing forbids.
    SCALED: tl.constexpr = QUANTIZED or HAS_CAP
    if SCALED:
        scores *= scales
    if QUANTIZED:
        slots = ids.to(tl.int64) * scale_block_stride + columns % BLOCK_SIZE
        scores *= tl.load(k_scales_ptr + slots)[None, :]
    if HAS_CAP:
        scores = soften(scores, soft_cap)
    if MASKED:
        visible = columns[None, :] <= positions
        if HAS_WINDOW:
            visible &= columns[None, :] > positions - sliding_window
        scores = tl.where(visible, scores, float("-inf"))
    largest = tl.max(scores, 1) if SCALED else tl.max(scores, 1) * scales
    new_maximum = tl.maximum(maximum, largest)
    base = new_maximum
    if HAS_WINDOW:
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row may see nothing of a tile
    shrink = tl.exp2(maximum - base)
    weights = tl.exp2(scores - base[:, None]) if SCALED else tl.exp2(scores * scales - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    v = load_v(v_ptr, ids, block_stride, columns, end, MASKED, HEAD_DIM, BLOCK_D, BLOCK_SIZE, V_TRANSPOSED)
    if QUANTIZED:
        v_scales = tl.load(v_scales_ptr + slots, mask=columns < end, other=0.0)
        weights *= v_scales[None, :] * V_UNIT
    result = tl.dot(weights.to(COMPUTE), widen(v, COMPUTE), result * shrink[:, None], input_precision="ieee")
    return new_maximum, total, result
