"""Ops that a backend may have in one piece, made of its others."""

from __future__ import annotations

from torch import Tensor

from octavo_kernels.backend import Backend, LayerKV


def rotary_write_kv(
    backend: Backend,
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv: LayerKV,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """`Backend.rotary_write_kv`. Queries are a view of qkv, or a new tensor where they are normed."""
    kv_heads = kv.k.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    q: Tensor = qkv[:, :heads]
    k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    if norms is None:
        backend.rotary(qkv[:, : heads + kv_heads], positions, cos_sin)
    else:
        q, k = (backend.rms_norm(x, weight, eps) for x, weight in zip((q, k), norms, strict=True))
        backend.rotary(q, positions, cos_sin)
        backend.rotary(k, positions, cos_sin)
    backend.write_kv(k, v, kv, slots)
    return q
