"""The decoder-only transformer of the llama family, shaped by a `ModelConfig`.

It computes one pass over a batch of tokens against the paged KV pool and gives logits for the rows that are asked
for. Which tokens, where their K and V go and what is sampled is decided elsewhere (`batch`, `sampler`); how an op is
computed is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, Backend, DecoderLayer, DecoderShape, LayerKV
from octavo_worker.loaders.config import ModelConfig
from octavo_worker.loaders.weights import Weights
from octavo_worker.models.layers import LayerReader, Quantization
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
        reader = LayerReader(config, weights, backend, dtype, quantization)
        embedding = reader.embedding()
        layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            layers.append(reader.layer(index))
            on_progress()
        shape = DecoderShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.head_dim**-0.5
        )
        last_norm, self._head = reader.head(num_sampled)
        self._layers = backend.decoder_layers(embedding, layers, last_norm, shape)
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
        `needs_prompt_lens`. on_progress is called now and then. Returns (R, num_sampled) fp32.
        """
        x = self.hidden(token_ids, batch, kv_layers, prompt_lens=prompt_lens, on_progress=on_progress)
        return self.logits(x, logit_rows)

    def hidden(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv_layers: Sequence[LayerKV],
        *,
        prompt_lens: Tensor | None = None,
        rows: Tensor | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """`forward` up to the head: what `logits` takes, (R, hidden) in the model's dtype. The next call may overwrite
        it.

        rows: (R,) int64, ascending, the tokens that are wanted; None: all.
        """
        positions, cos_sin = self._rotary.select(batch.positions, prompt_lens)
        return self._layers(token_ids, positions, cos_sin, batch, kv_layers, on_progress, rows)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits of some rows of what `hidden` gives, hidden: (T, hidden); rows: (R,) int64, None: all. Returns
        (R, num_sampled) fp32; a row's bits do not depend on the others."""
        return self._head(_rows(hidden, rows))

    def greedy(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """The ids of the greatest `logits`, (R,) int64; -1 where these are not finite."""
        return self._backend.linear_argmax(self._head, _rows(hidden, rows))


def _rows(hidden: Tensor, rows: Tensor | None) -> Tensor:
    return hidden if rows is None else hidden.index_select(0, rows)
