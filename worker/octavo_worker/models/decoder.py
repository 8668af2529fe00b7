"""The decoder-only transformer of the llama family, shaped by a `ModelConfig`.

It computes one pass over a batch of tokens against the paged KV pool and gives logits for the rows that are asked
for. Which tokens, where their K and V go and what is sampled is decided elsewhere (`batch`, `sampler`); how an op is
computed is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, Backend, LayerKV, Linear
from octavo_worker.loaders.config import ModelConfig
from octavo_worker.loaders.weights import Weights
from octavo_worker.models.rope import RotaryTable


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. The norms of queries and keys are None where the model has none."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    sliding_window: int | None


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
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the weights and prepares them for the backend. on_progress is called after each layer.

        Raises ModelLoadError for a tensor that is missing or has a shape that the config does not ask for.
        """
        self.config, self.dtype, self.num_sampled = config, dtype, num_sampled
        self.num_parameters = 0
        self._backend, self._weights = backend, weights
        self._scale = config.head_dim**-0.5
        width = config.hidden_size
        self._embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, width)
        self._layers: list[Layer] = []
        for index in range(config.num_layers):
            self._layers.append(self._read_layer(index))
            on_progress()
        self._norm = self._tensor("model.norm.weight", width)
        tied = config.tie_word_embeddings
        head = self._embedding if tied else self._tensor("lm_head.weight", config.vocab_size, width)
        self._head = backend.linear(head[:num_sampled])
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_model_len, backend.device)
        del self._weights

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
        heads, kv_heads = config.num_heads, config.num_kv_heads
        by_head = qkv.view(-1, heads + 2 * kv_heads, config.head_dim)
        v = by_head[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(by_head[:, :heads], layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(by_head[:, heads : heads + kv_heads], layer.k_norm, config.rms_norm_eps)
            ops.rotary(q, positions, cos_sin)
            ops.rotary(k, positions, cos_sin)
        else:
            ops.rotary(by_head[:, : heads + kv_heads], positions, cos_sin)
            q, k = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
        ops.write_kv(k, v, kv, batch.slots)
        return ops.paged_attention(q, kv, batch, scale=self._scale, sliding_window=layer.sliding_window)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._weights.get(name, shape, self.dtype)
        self.num_parameters += tensor.numel()
        return tensor.to(self._backend.device)

    def _read_layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        width, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            input_norm=self._tensor(prefix + "input_layernorm.weight", width),
            qkv=self._linear(
                [(attention + "q_proj", q_width), (attention + "k_proj", kv_width), (attention + "v_proj", kv_width)],
                width,
                bias=config.qkv_bias,
            ),
            q_norm=self._tensor(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._tensor(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
            output=self._linear([(attention + "o_proj", width)], q_width, bias=config.output_bias),
            mlp_norm=self._tensor(prefix + "post_attention_layernorm.weight", width),
            gate_up=self._linear([(mlp + "gate_proj", inner), (mlp + "up_proj", inner)], width, bias=config.mlp_bias),
            down=self._linear([(mlp + "down_proj", width)], inner, bias=config.mlp_bias),
            sliding_window=config.sliding_windows[index],
        )

    def _linear(self, parts: list[tuple[str, int]], in_features: int, *, bias: bool) -> Linear:
        """One linear layer out of several whose outputs stand side by side."""
        weight = torch.cat([self._tensor(f"{name}.weight", out, in_features) for name, out in parts])
        biases = torch.cat([self._tensor(f"{name}.bias", out) for name, out in parts]) if bias else None
        return self._backend.linear(weight, biases)
