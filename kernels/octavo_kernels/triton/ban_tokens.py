"""Bans of tokens by packed masks: every id whose bit is 0 gets the logit -inf."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.checks import check_column, refuse
from octavo_kernels.triton.variant import Variant

_BLOCK = 4096


@triton.jit(do_not_specialize=["num_rows"])
def _ban_tokens_kernel(
    logits_ptr,  # (num_rows, vocab), mutated
    rows_ptr,  # (n,)
    masks_ptr,  # (n, words)
    num_rows,
    row_stride,
    vocab,
    words,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + index)
    mask = (token < vocab) & (row >= 0) & (row < num_rows)
    word = tl.load(masks_ptr + index * words + token // 32, mask=mask, other=-1)
    is_banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * row_stride + token, -float("inf"), mask=mask & is_banned)


def ban_tokens(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """`Backend.ban_tokens`. Rows that do not exist are passed over."""
    if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        refuse("logits", logits, "(rows, vocab) of float32, the last dimension contiguous, is needed")
    num_rows, vocab = logits.shape
    count = rows.shape[0]
    check_column("rows", rows, count, torch.int64)
    wrong_shape = masks.dim() != 2 or masks.shape[0] != count or masks.shape[1] * 32 < vocab
    if masks.dtype is not torch.int32 or wrong_shape or not masks.is_contiguous():
        refuse("masks", masks, f"contiguous ({count}, {-(-vocab // 32)} or more) of torch.int32 is needed")
    if count and vocab:
        _ban_tokens_kernel[(count, triton.cdiv(vocab, _BLOCK))](
            logits, rows, masks, num_rows, logits.stride(0), vocab, masks.shape[1], BLOCK=_BLOCK
        )


def variants() -> list[Variant]:
    """The one form."""
    pointers = {"logits_ptr": "*fp32", "rows_ptr": "*i64", "masks_ptr": "*i32"}
    sizes = {"num_rows": "i32", "row_stride": "i32", "vocab": "i32", "words": "i32"}
    return [
        Variant("bans", _ban_tokens_kernel, {**pointers, **sizes}, {"BLOCK": _BLOCK}, unaligned=frozenset({"num_rows"}))
    ]
