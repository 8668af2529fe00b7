"""The decoder-only transformer of the llama family, shaped by a `ModelConfig`.

It computes one pass over a batch of tokens against the paged KV pool and gives logits for the rows that are asked
for. Which tokens, where their K and V go and what is sampled is decided elsewhere (`batch`, `sampler`); how an op is
computed is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, Backend, LayerKV
from octavo_worker.loaders.config import ModelConfig
from octavo_worker.loaders.weights import Weights
from octavo_worker.models.layers import Layer, LayerReader, Quantization
from octavo_worker.models.rope import RotaryTable


class Decoder:
    """A loaded model.

    num_sampled: the number of token ids that may be sampled; logits have as many columns. Rows of the head beyond the
    tokenizer's size are padding: they are not computed.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: Backend,
        dtype: torch.dtype,
        *,
        num_sampled: int,
        quantization: Quantization = "none",
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the weights and prepares them for the backend. on_progress is called after each layer.

        quantization: what the linear layers compute in, see `layers`; "none" is dtype.
        Raises ModelLoadError for a tensor that is missing or has a shape that the config does not ask for.
        """
        self.config, self.dtype, self.num_sampled = config, dtype, num_sampled
        self._backend = backend
        self._scale = config.head_dim**-0.5
        reader = LayerReader(config, weights, backend, dtype, quantization)
        self._embedding = reader.embedding()
        self._layers: list[Layer] = []
        for index in range(config.num_layers):
            self._layers.append(reader.layer(index))
            on_progress()
        self._norm, self._head = reader.head(num_sampled)
        self.num_parameters = reader.num_parameters
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_model_len, backend.device)

    @property
    def needs_prompt_lens(self) -> bool:
        """Whether `forward` needs to know how long each token's prompt is."""
        return self._rotary.depends_on_length

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_layers: Sequence[LayerKV],
        logit_rows: Tensor,
        *,
        prompt_lens: Tensor | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Computes the batch and writes its K and V into kv_layers, one a layer, which are mutated.

        token_ids: (T,) int32; logit_rows: (R,) int64, the tokens whose logits are wanted; prompt_lens: (T,) int32, see
        `needs_prompt_lens`. on_progress is called after each layer. Returns (R, num_sampled) fp32.
        """
        x = self.hidden(token_ids, batch, kv_layers, prompt_lens=prompt_lens, on_progress=on_progress)
        return self.logits(x, logit_rows)

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_layers: Sequence[LayerKV],
        *,
        prompt_lens: Tensor | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """`forward` up to the last layer: what `logits` takes, (T, hidden) in the model's dtype."""
        ops, config = self._backend, self.config
        positions, cos_sin = self._rotary.select(batch.positions, prompt_lens)
        x = F.embedding(token_ids, self._embedding)  # (T, hidden)
        for layer, kv in zip(self._layers, kv_layers, strict=True):
            h = ops.rms_norm(x, layer.input_norm, config.rms_norm_eps)
            attended = self._attend(layer, layer.qkv(h), positions, cos_sin, batch, kv)
            x = layer.output(attended, x)
            h = ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            x = layer.down(ops.silu_mul(layer.gate_up(h)), x)
            on_progress()
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits of some tokens of a pass. hidden: (T, hidden), as `hidden` gives it; rows: (R,) int64. Returns
        (R, num_sampled) fp32; a row's bits do not depend on the others."""
        x = self._backend.rms_norm(hidden.index_select(0, rows), self._norm, self.config.rms_norm_eps)
        return self._head(x).float()

    def _attend(
        self,
        layer: Layer,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        kv: LayerKV,
    ) -> Tensor:
        """Rotates queries and keys, stores K and V, attends. qkv: (T, (heads + 2 * KV heads) * head_dim), mutated."""
        ops, config = self._backend, self.config
        by_head = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        q = ops.rotary_write_kv(by_head, positions, cos_sin, kv, batch.slots, norms=norms, eps=config.rms_norm_eps)
        return ops.paged_attention(q, kv, batch, scale=self._scale, sliding_window=layer.sliding_window)
