"""Inputs, tolerances and paged batches for the tests of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels import AttentionBatch, Backend, KVLayout, LayerKV

ISAS = ("avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "generic")
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1e-2, 1.6e-2), torch.float16: (2e-3, 2e-3)}
DTYPES = tuple(TOLERANCES)


@dataclass(frozen=True)
class Sequence:
    """A sequence whose last `queries` tokens are computed in this pass."""

    context: int
    queries: int = 1


@dataclass(frozen=True)
class Paged:
    """Queries of one pass over a paged cache that is already written; unwritten slots hold NaN (see `spoiled_pool`)."""

    q: Tensor
    kv: LayerKV
    batch: AttentionBatch


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Reproducible normal values."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def spoiled_pool(layout: KVLayout, num_blocks: int) -> Tensor:
    """A pool in which everything unwritten is NaN; where K and V are quantized, their scales are."""
    filler = 0xFF if layout.is_quantized else float("nan")
    return torch.full(layout.pool_shape(num_blocks), filler, dtype=layout.pool_dtype)


def paged(
    writer: Backend,
    sequences: list[Sequence],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    first_seed: int = 1000,
) -> Paged:
    """A pass over `sequences`. Sequence i's tokens depend on first_seed + i alone; its blocks lie scattered.

    dtype: of the tokens; kv_dtype: of K and V where that is another.
    """
    needed = [-(-s.context // block_size) for s in sequences]
    layout = KVLayout(2, kv_heads, head_dim, block_size, kv_dtype or dtype)
    pool = spoiled_pool(layout, sum(needed) + 2)
    kv = layout.layer(pool, 1)
    free = torch.randperm(len(pool), generator=torch.Generator().manual_seed(7)).tolist()
    tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
    queries = []
    for i, sequence in enumerate(sequences):
        ids = [free.pop() for _ in range(needed[i])]
        tables[i, : len(ids)] = torch.tensor(ids)
        # Drawn per token, so that a shorter context is a prefix of a longer one.
        generator = torch.Generator().manual_seed(first_seed + i)
        tokens = torch.randn(sequence.context, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
        q, k, v = tokens.split((heads, kv_heads, kv_heads), dim=1)
        slots = torch.tensor([ids[p // block_size] * block_size + p % block_size for p in range(sequence.context)])
        writer.write_kv(k, v, kv, slots.int())
        queries.append(q[sequence.context - sequence.queries :])
    positions = torch.cat([torch.arange(s.context - s.queries, s.context) for s in sequences]).int()
    starts = torch.tensor([0] + [s.queries for s in sequences]).cumsum(0).int()
    contexts = torch.tensor([s.context for s in sequences]).int()
    batch = AttentionBatch(positions, torch.zeros_like(positions), starts, contexts, tables)
    return Paged(torch.cat(queries), kv, batch)
