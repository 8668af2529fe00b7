"""Sampling by arg max of scaled logits plus Gumbel noise, without state and without waiting for the device.

    id = argmax_v (logit_v - max) / temperature - log(-log(u_v))

The noise comes from Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
Rows are cut into parts of a fixed length, each a program's, and the parts' best are compared in the end: ties go to the
lowest id wherever it lies, so that a row's result depends neither on the cut nor on other rows. The random words are
exact; the two logarithms are the device's, and may differ from another backend's in their last digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.checks import check_column, refuse
from octavo_kernels.triton.variant import Variant

_PART = 4096
_LARGEST_ID = 0x7FFFFFFF
_NUM_WARPS = 8


@triton.jit
def gumbel(word):
    """-log(-log(u)) of u = (word >> 8) * 2^-24 + 2^-25. word: uint32.

    The 25 bits of u do not fit fp32 near 1, where 1 - u does. log(1 - r) is log(w) r / (1 - w) with w the rounded 1 - r
    (Goldberg, "What every computer scientist should know about floating-point arithmetic", theorem 4).
    """
    odd = ((word >> 8) * 2 + 1).to(tl.int32)  # u * 2^25
    is_above_half = odd > 16777216
    rest = (33554432 - odd).to(tl.float32) * 2.9802322387695312e-08  # 1 - u, exact where u > 1/2
    below = odd.to(tl.float32) * 2.9802322387695312e-08  # u, exact where u < 1/2
    near = 1.0 - rest
    argument = tl.where(is_above_half, near, below)
    is_rounded_away = argument == 1.0
    correction = tl.where(is_above_half, rest / tl.where(is_rounded_away, 1.0, 1.0 - near), 1.0)
    exponential = tl.where(is_rounded_away, rest, -tl.log(argument) * correction)
    return -tl.log(exponential)


@triton.jit
def _part_top_kernel(
    logits_ptr,  # (rows, vocab)
    tops_ptr,  # (rows, PARTS)
    row_stride,
    vocab,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """The largest logit of each part, +inf where there is a NaN: both spoil a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=-float("inf"))
    tl.store(tops_ptr + row * PARTS + part, tl.max(tl.where(x == x, x, float("inf")), axis=0))


@triton.jit
def _part_best_kernel(
    logits_ptr,  # (rows, vocab)
    least_ptr,  # (rows,) or None
    tops_ptr,  # (rows, PARTS)
    temperatures_ptr,  # (rows,)
    seeds_ptr,  # (rows,)
    positions_ptr,  # (rows,)
    scores_ptr,  # (rows, PARTS)
    ids_ptr,  # (rows, PARTS)
    row_stride,
    vocab,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """The best score of each part and the lowest id that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, PADDED_PARTS)
    top = tl.max(tl.load(tops_ptr + row * PARTS + parts, mask=parts < PARTS, other=-float("inf")), axis=0)
    counter = part * (PART // 4) + tl.arange(0, PART // 4)
    token = 4 * counter[:, None] + tl.arange(0, 4)[None, :]
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=-float("inf"))
    if least_ptr is not None:
        x = tl.where(x < tl.load(least_ptr + row), -float("inf"), x)
    temperature = tl.load(temperatures_ptr + row)
    score = x - top
    if temperature > 0.0:
        position = tl.load(positions_ptr + row)
        low = tl.zeros_like(counter) + (position & 0xFFFFFFFF).to(tl.int32)
        high = tl.zeros_like(counter) + (position >> 32).to(tl.int32)
        w0, w1, w2, w3 = tl.philox(tl.load(seeds_ptr + row), counter, tl.zeros_like(counter), low, high)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (counters, 2, 2), in order
        score = tl.div_rn(score, temperature) + gumbel(tl.reshape(words, (PART // 4, 4)))
    best = tl.max(tl.max(score, axis=1), axis=0)
    lowest = tl.min(tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=1), axis=0)
    tl.store(scores_ptr + row * PARTS + part, best)
    tl.store(ids_ptr + row * PARTS + part, lowest)


@triton.jit
def _best_kernel(
    tops_ptr,  # (rows, PARTS)
    scores_ptr,  # (rows, PARTS)
    ids_ptr,  # (rows, PARTS)
    temperatures_ptr,  # (rows,)
    out_ptr,  # (rows,)
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED_PARTS)
    mask = part < PARTS
    top = tl.max(tl.load(tops_ptr + row * PARTS + part, mask=mask, other=-float("inf")), axis=0)
    score = tl.load(scores_ptr + row * PARTS + part, mask=mask, other=-float("inf"))
    ids = tl.load(ids_ptr + row * PARTS + part, mask=mask, other=0x7FFFFFFF)
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, ids, 0x7FFFFFFF), axis=0).to(tl.int64)
    is_good = (tl.abs(top) < float("inf")) & (tl.load(temperatures_ptr + row) >= 0.0)
    tl.store(out_ptr + row, tl.where(is_good, winner, -1))


def gumbel_argmax(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, least: Tensor | None = None
) -> Tensor:
    """`Backend.gumbel_argmax`. Temperatures are not looked at here: a row whose own is negative or NaN gives -1.

    least: (S,) fp32, as `least_kept` gives it, or None: a row's logits below it count as -inf.
    """
    if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.stride(1) != 1 or logits.shape[1] == 0:
        refuse("logits", logits, "(rows, vocab) of float32, the last dimension contiguous, is needed")
    rows, vocab = logits.shape
    if vocab >= _LARGEST_ID - _PART:
        refuse("logits", logits, f"at most {_LARGEST_ID - _PART} columns are supported")
    check_column("temperatures", temperatures, rows, torch.float32)
    check_column("seeds", seeds, rows, torch.int64)
    check_column("positions", positions, rows, torch.int64)
    if least is not None:
        check_column("least", least, rows, torch.float32)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    parts = triton.cdiv(vocab, _PART)
    padded = triton.next_power_of_2(parts)
    tops = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    scores = torch.empty_like(tops)  # memory of its own begins where kernels compiled for any other batch expect it
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    grid = (rows, parts)
    _part_top_kernel[grid](logits, tops, logits.stride(0), vocab, PARTS=parts, PART=_PART, num_warps=_NUM_WARPS)
    _part_best_kernel[grid](
        logits, least, tops, temperatures, seeds, positions, scores, ids, logits.stride(0), vocab,
        PARTS=parts, PADDED_PARTS=padded, PART=_PART, num_warps=_NUM_WARPS,
    )  # fmt: skip
    _best_kernel[(rows,)](tops, scores, ids, temperatures, out, PARTS=parts, PADDED_PARTS=padded, num_warps=1)
    return out


def variants() -> list[Variant]:
    """For a vocabulary of 128,256, filtered and not."""
    parts = triton.cdiv(128256, _PART)
    padded = triton.next_power_of_2(parts)
    size = {"row_stride": "i32", "vocab": "i32"}
    columns = {"temperatures_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i64"}
    found = {"tops_ptr": "*fp32", "scores_ptr": "*fp32", "ids_ptr": "*i32"}
    logits = {"logits_ptr": "*fp32"}
    cut = {"PARTS": parts, "PADDED_PARTS": padded}
    return [
        Variant(
            "largest logits", _part_top_kernel, {**logits, "tops_ptr": "*fp32", **size},
            {"PARTS": parts, "PART": _PART}, _NUM_WARPS,
        ),
        Variant(
            "sampling, filtered", _part_best_kernel, {**logits, "least_ptr": "*fp32", **columns, **found, **size},
            {**cut, "PART": _PART}, _NUM_WARPS,
        ),
        Variant(
            "sampling", _part_best_kernel, {**logits, **columns, **found, **size},
            {"least_ptr": None, **cut, "PART": _PART}, _NUM_WARPS,
        ),
        Variant(
            "best of the parts", _best_kernel, {**found, "temperatures_ptr": "*fp32", "out_ptr": "*i64"}, cut, 1
        ),
    ]  # fmt: skip
