"""The layers of a decoder, composed of a backend's ops one by one: what every backend's `decoder_layers` computes.

It serves backends that have nothing faster, and says which op stands where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from octavo_kernels.backend import AttentionBatch, Backend, DecoderLayer, DecoderShape, LayerKV


class ComposedLayers:
    """See `octavo_kernels.backend.DecoderLayers`."""

    def __init__(self, backend: Backend, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._ops, self._layers, self._shape = backend, tuple(layers), shape

    def __call__(
        self,
        x: Tensor,
        rotary_positions: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        kv_layers: Sequence[LayerKV],
        on_progress: Callable[[], None],
    ) -> Tensor:
        ops, eps = self._ops, self._shape.norm_eps
        for layer, kv in zip(self._layers, kv_layers, strict=True):
            qkv = layer.qkv(ops.rms_norm(x, layer.input_norm, eps))
            x = layer.output(self._attend(layer, qkv, rotary_positions, cos_sin, batch, kv), x)
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(h)), x)
            on_progress()
        return x

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
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        by_head = qkv.view(-1, heads + 2 * kv_heads, shape.head_dim)
        v = by_head[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(by_head[:, :heads], layer.q_norm, shape.norm_eps)
            k = ops.rms_norm(by_head[:, heads : heads + kv_heads], layer.k_norm, shape.norm_eps)
            ops.rotary(q, positions, cos_sin)
            ops.rotary(k, positions, cos_sin)
        else:
            ops.rotary(by_head[:, : heads + kv_heads], positions, cos_sin)
            q, k = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
        ops.write_kv(k, v, kv, batch.slots)
        return ops.paged_attention(q, kv, batch, scale=shape.scale, sliding_window=layer.sliding_window)
