"""Passes over a paged pool of random numbers, for the kernels that read and write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.bench import Bench
from octavo_kernels import AttentionBatch, LayerKV


@dataclass(frozen=True)
class Pass:
    """Queries, keys and values of one pass, the layer they go to, and where they stand."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv: LayerKV
    batch: AttentionBatch
    scale: float


def paged_pass(
    bench: Bench, *, sequences: int, context: int, queries: int, kv_dtype: torch.dtype | None = None
) -> Pass:
    """A pass in which each sequence computes its last `queries` tokens; its blocks lie scattered over one layer.

    kv_dtype: of stored K and V, None for the model's.
    """
    model, size, device = bench.sizes.model, bench.sizes.block_size, bench.device.torch_device
    blocks = -(-context // size)
    layout = bench.backend.kv_layout(
        num_layers=1,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=size,
        dtype=kv_dtype or bench.sizes.dtype,
    )
    pool = torch.zeros(layout.pool_shape(sequences * blocks), dtype=layout.pool_dtype, device=device)
    if not layout.is_quantized:
        pool.normal_(generator=bench.generator(0))
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0))
    tables = order.view(sequences, blocks).int()
    positions = torch.arange(context - queries, context).repeat(sequences)
    owners = torch.arange(sequences).repeat_interleave(queries)
    slots = tables[owners, positions // size] * size + positions % size
    columns = (
        positions,
        slots,
        torch.arange(sequences + 1) * queries,
        torch.full((sequences,), context),
    )
    batch = AttentionBatch(
        *(column.int().to(device) for column in columns),  # type: ignore[misc, arg-type]
        block_tables=tables.to(device),
        max_queries=queries,
    )
    tokens = sequences * queries
    kv = layout.layer(pool, 0)
    if layout.is_quantized:
        _fill(bench, kv)
    return Pass(
        q=bench.normal(tokens, model.num_heads, model.head_dim, seed=1),
        k=bench.normal(tokens, model.num_kv_heads, model.head_dim, seed=2),
        v=bench.normal(tokens, model.num_kv_heads, model.head_dim, seed=3),
        kv=kv,
        batch=batch,
        scale=model.head_dim**-0.5,
    )


def _fill(bench: Bench, kv: LayerKV) -> None:
    """Random numbers in every slot, quantized by the oracle."""
    num_slots = kv.k.shape[0] * bench.sizes.block_size
    shape = (num_slots, kv.k.shape[1], kv.k.shape[2])
    slots = torch.arange(num_slots, dtype=torch.int32, device=bench.device.torch_device)
    bench.reference.write_kv(bench.normal(*shape, seed=4), bench.normal(*shape, seed=5), kv, slots)
