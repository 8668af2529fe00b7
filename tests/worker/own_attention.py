"""Attention classes of one's own, as `tests/worker/test_custom_attention.py` names them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from octavo_kernels import AttentionBatch, LayerKV
from octavo_kernels.attention import AttentionOptions, AttentionSetup


class Plain:
    """The same attention, sequence by sequence, as one would write it down. num_calls: how often it was used."""

    row_invariant = False
    only_enqueues = False
    num_calls = 0

    def __init__(self, setup: AttentionSetup) -> None:
        self._setup = setup

    def __call__(self, q: Tensor, kv: LayerKV, batch: AttentionBatch, options: AttentionOptions) -> Tensor:
        type(self).num_calls += 1
        out = torch.zeros_like(q).flatten(1)
        starts = batch.query_starts.tolist()
        for sequence, (begin, end) in enumerate(itertools.pairwise(starts)):
            context = int(batch.context_lens[sequence])
            blocks = batch.block_tables[sequence, : -(-context // self._setup.block_size)].long()
            k = kv.k[blocks].permute(1, 2, 0, 3).flatten(2)[..., :context]  # (KV heads, head_dim, context)
            v = kv.v[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :context]  # (KV heads, context, head_dim)
            queries = q[begin:end].unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)  # (KV heads, group, n, head_dim)
            scores = queries @ k[:, None] * options.scale
            hidden = torch.arange(context) > batch.positions[begin:end, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            out[begin:end] = (weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1)
        return out


class Oracle:
    """Passes on to the backend that it stands in for."""

    row_invariant = True
    only_enqueues = True

    def __init__(self, setup: AttentionSetup) -> None:
        self._backend = setup.backend

    def __call__(self, q: Tensor, kv: LayerKV, batch: AttentionBatch, options: AttentionOptions) -> Tensor:
        return self._backend.paged_attention(q, kv, batch, **options.given())


class Narrow(Plain):
    """Forgets a head."""

    def __call__(self, q: Tensor, kv: LayerKV, batch: AttentionBatch, options: AttentionOptions) -> Tensor:
        return super().__call__(q, kv, batch, options)[:, : -q.shape[2]].contiguous()


class Unsure(Plain):
    """Does not say whether it waits for the device."""

    only_enqueues = None  # type: ignore[assignment]


class Picky(Plain):
    """Does not take this model."""

    def __init__(self, setup: AttentionSetup) -> None:
        raise ValueError(f"heads of {setup.head_dim} are not supported")


def function(setup: AttentionSetup) -> Plain:
    """No class."""
    return Plain(setup)
