"""Paged attention of any pass: which kernels it takes.

A pass in which no sequence owns more than one token is decoding, and takes the split kernel. Any other can go in one
launch; but there a decode beside a prefill is one program a KV head, which crawls along a long context alone, so that
from LONG_CONTEXT on decodes take the split kernel and the rest a launch of its own. Both choices are made from what the
host knows, and each kernel leaves the other's sequences alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, LayerKV
from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.triton.checks import check_activations, check_column, refuse
from octavo_kernels.triton.paged_attention_decode import paged_attention_decode
from octavo_kernels.triton.paged_attention_prefill import paged_attention_prefill
from octavo_kernels.triton.paged_kv import check_tiles

# Positions that a token may see: as many as a block table has room for, or a sliding window. Up to here a program is
# expected to read its context in about the time of the two launches that it saves.
LONG_CONTEXT = 1024


def paged_attention(
    q: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `Backend.paged_attention`. Checks shapes, strides and dtypes, never values. Waits for nothing."""
    tokens, heads, head_dim = _check(q, kv, batch, sliding_window, soft_cap, sinks)
    out = torch.empty((tokens, heads * head_dim), dtype=q.dtype, device=q.device)
    max_queries = tokens if batch.max_queries is None else batch.max_queries
    if tokens == 0:
        return out
    is_decode = max_queries == 1
    max_context = batch.block_tables.shape[1] * kv.k.shape[3]
    is_split = is_decode or min(max_context, sliding_window or max_context) > LONG_CONTEXT
    if is_split:
        paged_attention_decode(
            q, kv, batch, out, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks
        )
    if not is_decode:
        paged_attention_prefill(
            q,
            kv,
            batch,
            out,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            min_queries=2 if is_split else 1,
        )
    return out


def _check(
    q: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> tuple[int, int, int]:
    """The shape of q; raises InvalidArgumentError for what the kernels would misread."""
    check_activations("q", q)
    check_tiles(kv)
    kv_heads, head_dim = kv.k.shape[1:3]
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % kv_heads != 0 or q.shape[1] == 0:
        refuse("q", q, f"(tokens, a multiple of {kv_heads}, {head_dim}) is needed")
    if q.stride(1) != head_dim and q.shape[1] > 1:
        refuse("q", q, "only the first dimension may be strided")
    if kv.k_scales is None and q.dtype is not kv.k.dtype:
        refuse("q", q, f"kv's dtype, {kv.k.dtype}, is needed")
    if sliding_window is not None and sliding_window < 1:
        raise InvalidArgumentError(f"sliding_window is {sliding_window}; it must be at least 1, or None")
    if soft_cap is not None and not soft_cap > 0:
        raise InvalidArgumentError(f"soft_cap is {soft_cap}; it must be positive, or None")
    if sinks is not None:
        check_column("sinks", sinks, q.shape[1], torch.float32)
    tables = batch.block_tables
    check_column("positions", batch.positions, q.shape[0], torch.int32)
    check_column("query_starts", batch.query_starts, tables.shape[0] + 1, torch.int32)
    if tables.dtype is not torch.int32 or tables.dim() != 2 or (tables.shape[1] > 1 and tables.stride(1) != 1):
        refuse("block_tables", tables, "(sequences, max_blocks) of int32, rows contiguous, is needed")
    return q.shape[0], q.shape[1], head_dim
