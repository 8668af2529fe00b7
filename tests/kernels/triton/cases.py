"""Paged batches in the layout of the Triton kernels, tolerances, and a GPU as the kernels see it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from octavo_kernels import AttentionBatch, LayerKV
from octavo_kernels.reference import ReferenceBackend
from octavo_kernels.triton.device import LARGE_SHARED_MEMORY, DeviceTraits
from octavo_kernels.triton.paged_kv import kv_layout

TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1e-2, 1.6e-2)}
# Of an H200. With them the interpreter runs the kernels that one would run: e4m3 as it is, multiplied as fp16.
HOPPER_TRAITS = DeviceTraits(num_sms=132, shared_memory=LARGE_SHARED_MEMORY, native_float8=True, interpreted=False)

# Marks of tests that hold for attention of either kind, with the heads, KV heads and head size of a `paged_case`.
every_head_size = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (2, 2, 80), (3, 1, 96), (4, 1, 128), (2, 1, 256)]
)
some_head_sizes = pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 96), (2, 1, 256)])


@dataclass(frozen=True)
class Case:
    """Queries of one pass over a cache that is already written; what is not written is NaN, or 0 in 8 bits."""

    q: Tensor
    kv: LayerKV
    batch: AttentionBatch


def paged_case(
    sequences: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    transposed: tuple[bool, bool] | None = None,
) -> Case:
    """A pass over sequences of (tokens in the cache, of which the last so many are queries), blocks scattered.

    stored: dtype of K and V, None for that of the queries; transposed: K and V, None as the kernels choose it
    """
    generator = torch.Generator().manual_seed(sum(c for c, _ in sequences) + heads + head_dim)
    needed = [-(-context // block_size) for context, _ in sequences]
    layout = kv_layout(2, kv_heads, head_dim, block_size, stored or dtype)
    if transposed is not None:
        layout = replace(layout, k_transposed=transposed[0], v_transposed=transposed[1])
    shape = layout.pool_shape(sum(needed) + 2)
    nothing = 0 if layout.is_quantized else float("nan")
    kv = layout.layer(torch.full(shape, nothing, dtype=layout.pool_dtype), 1)
    free = torch.randperm(shape[0], generator=generator).tolist()
    tables = torch.full((len(sequences), max(needed) + 1), 0, dtype=torch.int32)
    queries, positions = [], []
    for i, (context, count) in enumerate(sequences):
        ids = [free.pop() for _ in range(needed[i])]
        tables[i, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        tokens = torch.randn(context, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
        q, k, v = tokens.split((heads, kv_heads, kv_heads), dim=1)
        slots = [ids[p // block_size] * block_size + p % block_size for p in range(context)]
        ReferenceBackend().write_kv(k, v, kv, torch.tensor(slots, dtype=torch.int32))
        queries.append(q[context - count :])
        positions += range(context - count, context)
    counts = [count for _, count in sequences]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    contexts = torch.tensor([context for context, _ in sequences]).int()
    column = torch.tensor(positions, dtype=torch.int32)
    batch = AttentionBatch(column, torch.zeros_like(column), starts, contexts, tables, max(counts))
    return Case(torch.cat(queries), kv, batch)
