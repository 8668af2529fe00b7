"""A decoder but for its head, composed of a backend's ops one by one: what every backend's `decoder_layers` computes.

It serves backends that have nothing faster, and says which op stands where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from octavo_kernels.backend import AttentionBatch, Backend, DecoderLayer, DecoderShape, LayerKV


class ComposedLayers:
    """See `octavo_kernels.backend.DecoderLayers`."""

    def __init__(
        self,
        backend: Backend,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        last_norm: Tensor,
        shape: DecoderShape,
    ) -> None:
        self._ops, self._layers, self._shape = backend, tuple(layers), shape
        self._embedding, self._last_norm = embedding, last_norm

    def __call__(
        self,
        token_ids: Tensor,
        rotary_positions: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        kv_layers: Sequence[LayerKV],
        on_progress: Callable[[], None],
        rows: Tensor | None = None,
    ) -> Tensor:
        ops, eps = self._ops, self._shape.norm_eps
        x = self._embedding.index_select(0, token_ids)
        for layer, kv in zip(self._layers, kv_layers, strict=True):
            qkv = layer.qkv(ops.rms_norm(x, layer.input_norm, eps))
            x = layer.output(self._attend(layer, qkv, rotary_positions, cos_sin, batch, kv), x)
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(h)), x)
            on_progress()
        return ops.rms_norm(x if rows is None else x.index_select(0, rows), self._last_norm, eps)

    def _attend(
        self,
        layer: DecoderLayer,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        kv: LayerKV,
    ) -> Tensor:
        """Rotates queries and keys, stores K and V, attends. qkv: (T, (heads + 2 * KV heads) * head_dim), mutated."""
        ops, shape = self._ops, self._shape
        by_head = qkv.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        q = ops.rotary_write_kv(by_head, positions, cos_sin, kv, batch.slots, norms=norms, eps=shape.norm_eps)
        return ops.paged_attention(q, kv, batch, scale=shape.scale, sliding_window=layer.sliding_window)
