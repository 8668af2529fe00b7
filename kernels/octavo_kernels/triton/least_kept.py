"""Top-k, top-p and min-p as one bound a row: the least logit that they keep. Nothing is sorted.

The bound of top-k is the largest of a row's values v such that at least k of its logits are not below v; that of top-p
is the largest v such that what is not below v holds at least the share p of the mass. Both are searched for alike: the
sum of weights (1, or exp((x - max) / temperature)) over all x >= v falls as v grows, so an interval is narrowed until
one value is left. A pass tries three pivots: two around the point where the logarithm of the sum would meet the target
if it were linear, and the middle of the interval in the order of fp32's bits, which bounds the passes to 32 whatever
the row holds. Two passes go over the row; what is still in question then is put aside, and looked at alone.

This is the pivot search of FlashInfer (Ye et al., "Sorting-free GPU kernels for LLM sampling", 2025), which samples by
it, with other pivots. A row is one program's, in a fixed order, so its bound does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.checks import check_column, refuse
from octavo_kernels.triton.variant import Variant

_BLOCK = 4096
_NUM_WARPS = 16


@triton.jit
def _flip(bits):
    """From fp32's bits to integers in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _inside(pivot, low, high):
    """The number nearest to pivot in (low, high]; high where they are one."""
    key = _flip(pivot.to(tl.int32, bitcast=True))
    first = _flip(low.to(tl.int32, bitcast=True)) + 1
    last = _flip(high.to(tl.int32, bitcast=True))
    return _flip(tl.minimum(tl.maximum(key, first), last)).to(tl.float32, bitcast=True)


@triton.jit
def _before(number):
    """The next smaller number."""
    return _flip(_flip(number.to(tl.int32, bitcast=True)) - 1).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """The middle of (low, high] in the order of fp32's bits; high where they are one."""
    first = _flip(low.to(tl.int32, bitcast=True)).to(tl.int64)
    last = _flip(high.to(tl.int32, bitcast=True)).to(tl.int64)
    return _flip(((first + last + 1) >> 1).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _read(row_ptr, start, vocab, BLOCK: tl.constexpr):
    """Logits of a row, -inf behind its end, without a negative zero: it is no number of its own."""
    token = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + token, mask=token < vocab, other=-float("inf"))
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _weigh(x, greatest, inverse_temperature, BY_MASS: tl.constexpr):
    if BY_MASS:
        return tl.exp((x - greatest) * inverse_temperature)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _pivots(low, high, low_sum, above, target):
    """Three numbers in (low, high], or high where these are one."""
    # Where nothing is above high, high is the greatest, which weighs 1 alone.
    high_sum = tl.maximum(above, 1.0)
    slope = tl.log(low_sum) - tl.log(high_sum)
    share = (tl.log(low_sum) - tl.log(target)) / tl.where(slope > 0.0, slope, 1.0)
    width = high - low
    crossing = low + tl.minimum(tl.maximum(share, 0.0), 1.0) * width
    a, b = _inside(crossing - 0.0625 * width, low, high), _inside(crossing + 0.0625 * width, low, high)
    return a, b, _middle(low, high)


@triton.jit
def _cut(pivot, total, target, low, high, low_sum, above):
    """The interval when `total` is the sum over what is not below pivot."""
    is_low, is_high = (total >= target) & (pivot > low), (total < target) & (pivot <= high)
    low, low_sum = tl.where(is_low, pivot, low), tl.where(is_low, total, low_sum)
    high, above = tl.where(is_high, _before(pivot), high), tl.where(is_high, total, above)
    return low, high, low_sum, above


@triton.jit
def _narrow(
    row_ptr, vocab, low, high, low_sum, above, target, greatest, inverse_temperature,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over the whole row. Arguments and results as in `_search`."""
    pivot_a, pivot_b, pivot_c = _pivots(low, high, low_sum, above, target)
    weights_a = tl.zeros((BLOCK,), tl.float32)
    weights_b, weights_c = weights_a, weights_a
    for start in range(0, vocab, BLOCK):
        x = _read(row_ptr, start, vocab, BLOCK)
        weight = _weigh(x, greatest, inverse_temperature, BY_MASS)
        weights_a += tl.where(x >= pivot_a, weight, 0.0)
        weights_b += tl.where(x >= pivot_b, weight, 0.0)
        weights_c += tl.where(x >= pivot_c, weight, 0.0)
    low, high, low_sum, above = _cut(pivot_a, tl.sum(weights_a), target, low, high, low_sum, above)
    low, high, low_sum, above = _cut(pivot_b, tl.sum(weights_b), target, low, high, low_sum, above)
    low, high, low_sum, above = _cut(pivot_c, tl.sum(weights_c), target, low, high, low_sum, above)
    return low, high, low_sum, above


@triton.jit
def _gather(row_ptr, vocab, low, high, found_ptr, BLOCK: tl.constexpr):
    """(how many, least, greatest) of a row's values from low to high, which go to found_ptr."""
    count = tl.full((), 0, tl.int32)
    least, greatest = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), -float("inf"), tl.float32)
    tl.debug_barrier()  # nobody reads what was found before
    for start in range(0, vocab, BLOCK):
        x = _read(row_ptr, start, vocab, BLOCK)
        is_found = (x >= low) & (x <= high)
        places = count + tl.cumsum(is_found.to(tl.int32), axis=0) - 1
        tl.store(found_ptr + places, x, mask=is_found)
        count += tl.sum(is_found.to(tl.int32))
        least = tl.minimum(least, tl.where(is_found, x, float("inf")))
        greatest = tl.maximum(greatest, tl.where(is_found, x, -float("inf")))
    tl.debug_barrier()  # all of it is there
    return count, tl.min(least), tl.max(greatest)


@triton.jit
def _snap(total, nearest_above, nearest_below, target, low, high, low_sum, above):
    """`_cut` to values that there are: the nearest that is not below the pivot, and the nearest that is."""
    is_low, is_high = (total >= target) & (nearest_above > low), (total < target) & (nearest_below < high)
    low, low_sum = tl.where(is_low, nearest_above, low), tl.where(is_low, total, low_sum)
    high, above = tl.where(is_high, nearest_below, high), tl.where(is_high, total, above)
    return low, high, low_sum, above


@triton.jit
def _search(
    row_ptr,
    vocab,
    found_ptr,  # room for vocab numbers
    low,  # the sum over what is not below low reaches target
    high,
    low_sum,  # that sum
    target,
    greatest,
    inverse_temperature,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """The largest value in the row, from low to high, at which the sum over what is not below it reaches target.

    Two passes over the row leave few values in question, which are then all that is looked at. `above`: the sum over
    what is above high.
    """
    above = tl.full((), 0.0, tl.float32)
    for _ in tl.static_range(2):
        low, high, low_sum, above = _narrow(
            row_ptr, vocab, low, high, low_sum, above, target, greatest, inverse_temperature, BY_MASS, BLOCK
        )  # fmt: skip
    base = above
    count, low, high = _gather(row_ptr, vocab, low, high, found_ptr, BLOCK)
    while low < high:
        pivot_a, pivot_b, pivot_c = _pivots(low, high, low_sum, above, target)
        nothing, infinite = tl.zeros((FEW,), tl.float32), tl.full((FEW,), float("inf"), tl.float32)
        weights_a, weights_b, weights_c = nothing, nothing, nothing
        above_a, above_b, above_c = infinite, infinite, infinite
        below_a, below_b, below_c = -infinite, -infinite, -infinite
        for start in range(0, count, FEW):
            x = _read(found_ptr, start, count, FEW)
            weight = _weigh(x, greatest, inverse_temperature, BY_MASS)
            weights_a += tl.where(x >= pivot_a, weight, 0.0)
            weights_b += tl.where(x >= pivot_b, weight, 0.0)
            weights_c += tl.where(x >= pivot_c, weight, 0.0)
            above_a = tl.minimum(above_a, tl.where(x >= pivot_a, x, float("inf")))
            above_b = tl.minimum(above_b, tl.where(x >= pivot_b, x, float("inf")))
            above_c = tl.minimum(above_c, tl.where(x >= pivot_c, x, float("inf")))
            below_a = tl.maximum(below_a, tl.where(x >= pivot_a, -float("inf"), x))
            below_b = tl.maximum(below_b, tl.where(x >= pivot_b, -float("inf"), x))
            below_c = tl.maximum(below_c, tl.where(x >= pivot_c, -float("inf"), x))
        low, high, low_sum, above = _snap(
            base + tl.sum(weights_a), tl.min(above_a), tl.max(below_a), target, low, high, low_sum, above
        )  # fmt: skip
        low, high, low_sum, above = _snap(
            base + tl.sum(weights_b), tl.min(above_b), tl.max(below_b), target, low, high, low_sum, above
        )  # fmt: skip
        low, high, low_sum, above = _snap(
            base + tl.sum(weights_c), tl.min(above_c), tl.max(below_c), target, low, high, low_sum, above
        )  # fmt: skip
    return low


@triton.jit
def _range(row_ptr, vocab, BLOCK: tl.constexpr):
    """(greatest, least above -inf, how many are above -inf) of a row; the greatest is inf where there is a NaN."""
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)
    bottoms = tl.full((BLOCK,), float("inf"), tl.float32)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _read(row_ptr, start, vocab, BLOCK)
        tops = tl.maximum(tops, tl.where(x == x, x, float("inf")))
        bottoms = tl.minimum(bottoms, tl.where(x > -float("inf"), x, float("inf")))
        counts += (x > -float("inf")).to(tl.int32)
    return tl.max(tops), tl.min(bottoms), tl.sum(counts)


@triton.jit
def _mass(row_ptr, vocab, least, greatest, inverse_temperature, BLOCK: tl.constexpr):
    """(mass of what is above least, how many that are)."""
    weights, over = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _read(row_ptr, start, vocab, BLOCK)
        weights += tl.where(x > least, _weigh(x, greatest, inverse_temperature, True), 0.0)
        over += (x > least).to(tl.int32)
    return tl.sum(weights), tl.sum(over)


@triton.jit
def _least_kept_kernel(
    logits_ptr,  # (rows, vocab)
    temperatures_ptr,  # (rows,)
    top_k_ptr,  # (rows,)
    top_p_ptr,  # (rows,)
    min_p_ptr,  # (rows,)
    found_ptr,  # (rows, vocab), for what is in question
    out_ptr,  # (rows,)
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,  # of what is in question, at once: less, since more is asked of it
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr, found_ptr = logits_ptr + row * row_stride, found_ptr + row * vocab
    temperature = tl.load(temperatures_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    least = tl.full((), -float("inf"), tl.float32)
    greatest, smallest, count = least, least, tl.full((), 0, tl.int32)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        greatest, smallest, count = _range(row_ptr, vocab, BLOCK)
    if tl.abs(greatest) < float("inf"):
        inverse = tl.div_rn(1.0, temperature)
        is_cut = (top_k > 0) & (top_k < count)
        if is_cut:
            least = _search(
                row_ptr, vocab, found_ptr, smallest, greatest, count.to(tl.float32), top_k.to(tl.float32), greatest,
                inverse, False, BLOCK, FEW,
            )  # fmt: skip
        if top_p < 1.0:
            mass, over = _mass(row_ptr, vocab, least, greatest, inverse, BLOCK)
            if is_cut:  # of those that equal the k-th, as many as make up k
                mass += (top_k - over).to(tl.float32) * tl.exp((least - greatest) * inverse)
            # What is so far below the greatest weighs less than 1 - p all together, and the greatest alone weighs 1.
            reach = greatest - temperature * tl.log(vocab / (1.0 - top_p))
            least = _search(
                row_ptr, vocab, found_ptr, tl.maximum(least, reach), greatest, mass, top_p * mass, greatest, inverse,
                True, BLOCK, FEW,
            )  # fmt: skip
        if min_p > 0.0:
            least = tl.maximum(least, greatest + temperature * tl.log(min_p))
        least = tl.minimum(least, greatest)
    tl.store(out_ptr + row, least)


def least_kept(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """(R,) fp32: the least logit that the filters keep in each row; the likeliest token is always kept.

    logits: (R, vocab) fp32, -inf for banned ids; temperatures: (R,) fp32 above 0; top_k: (R,) int64, 0 for all; top_p:
    (R,) fp32, 1 for all; min_p: (R,) fp32, 0 for all. They hold in this order. Tokens that equal the least are kept
    too, so that the order of equals never matters. Rows that cannot be sampled, and those at temperature 0, get -inf.
    """
    if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.stride(1) != 1 or logits.shape[1] == 0:
        refuse("logits", logits, "(rows, vocab) of float32, the last dimension contiguous, is needed")
    rows, vocab = logits.shape
    if vocab >= 1 << 24:
        refuse("logits", logits, "fewer than 16,777,216 columns are needed: they are counted in fp32")
    check_column("temperatures", temperatures, rows, torch.float32)
    check_column("top_k", top_k, rows, torch.int64)
    check_column("top_p", top_p, rows, torch.float32)
    check_column("min_p", min_p, rows, torch.float32)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    found = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    if rows:
        _least_kept_kernel[(rows,)](
            logits, temperatures, top_k, top_p, min_p, found, out, logits.stride(0), vocab,
            BLOCK=block, FEW=max(1, block // 2), num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def variants() -> list[Variant]:
    """The one form, for vocabularies of more than 4,096."""
    columns = {"temperatures_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
    signature = {
        "logits_ptr": "*fp32",
        **columns,
        "found_ptr": "*fp32",
        "out_ptr": "*fp32",
        "row_stride": "i32",
        "vocab": "i32",
    }
    return [Variant("filters", _least_kept_kernel, signature, {"BLOCK": _BLOCK, "FEW": _BLOCK // 2}, _NUM_WARPS)]
