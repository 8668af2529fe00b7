"""Reads a model's weights and prepares them for a backend: the layers that a `Decoder` computes with.

With quantization "int8" the linear layers and the head take weights and activations of 8 bits. The residual stream is
rotated then (`rotation`): the embeddings and the layers that write to it are multiplied by the rotation, those that
read it by its inverse and by the gains of the norm before them, which become ones.

With "int4" they take weights in groups of 4 bits, the file's own as they are, and activations of 8; other weights are
rounded to such groups. Nothing is rotated. The head, which decides between tokens that are close, is of 8 bits unless
the file has it in 4. A backend may keep the activations as they are (`Backend.int4_linear`).

With "fp8" they take weights and activations in e4m3, which has room for outliers: nothing is rotated. The head stays in
the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from octavo_kernels.backend import Backend, DecoderLayer, Linear
from octavo_kernels.int4 import Int4Weight, quantize_int4
from octavo_worker.loaders.config import ModelConfig
from octavo_worker.loaders.weights import Weights
from octavo_worker.models.rotation import Rotation

Quantization = Literal["none", "int8", "int4", "fp8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

# Activations that do not come from the residual stream are not rotated; scales for groups keep their outliers apart.
_ACTIVATION_GROUP = 64


class LayerReader:
    """Gives the parts of a model, each to be asked for once; the embedding before the head.

    num_parameters counts what was read so far. Raises ModelLoadError for a tensor that is missing or has a shape that
    the config does not ask for.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, backend: Backend, dtype: torch.dtype, quantization: Quantization
    ) -> None:
        self.num_parameters = 0
        self._config, self._weights, self._backend, self._dtype = config, weights, backend, dtype
        self._quantization = quantization
        self._rotation = Rotation(config.hidden_size) if quantization == "int8" else None
        self._read_dtype = dtype if quantization == "none" else torch.float32
        self._tied: Tensor | None = None

    def embedding(self) -> Tensor:
        """(vocab_size, hidden_size) in the model's dtype."""
        config = self._config
        table = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self._tied = table
        rotated = table if self._rotation is None else self._rotation.rotate(table)
        return rotated.to(self._backend.device, self._dtype)

    def layer(self, index: int) -> DecoderLayer:
        """The layer of this index."""
        config, prefix = self._config, f"model.layers.{index}."
        inner = config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        input_norm, qkv = self._reading(
            prefix + "input_layernorm.weight",
            [(attention + "q_proj", q_width), (attention + "k_proj", kv_width), (attention + "v_proj", kv_width)],
            bias=config.qkv_bias,
        )
        output = self._writing(attention + "o_proj", q_width, bias=config.output_bias)
        mlp_norm, gate_up = self._reading(
            prefix + "post_attention_layernorm.weight",
            [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)],
            bias=config.mlp_bias,
        )
        return DecoderLayer(
            input_norm=input_norm,
            qkv=qkv,
            q_norm=self._head_norm(attention + "q_norm.weight"),
            k_norm=self._head_norm(attention + "k_norm.weight"),
            output=output,
            mlp_norm=mlp_norm,
            gate_up=gate_up,
            down=self._writing(mlp + "down_proj", inner, bias=config.mlp_bias),
            sliding_window=config.sliding_windows[index],
        )

    def head(self, num_rows: int) -> tuple[Tensor, Linear]:
        """The last norm and the first rows of the head, whose logits are fp32."""
        config = self._config
        gains = self._tensor("model.norm.weight", config.hidden_size)
        if self._quantization == "int4":
            name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
            stored = self._weights.get_int4(name, (config.vocab_size, config.hidden_size))
            if stored is not None:
                self.num_parameters += 0 if config.tie_word_embeddings else stored.integers.numel()
                self._tied = None
                return self._gains(gains), self._int4_linear(stored.first_rows(num_rows), None, torch.float32)
        table = self._tied
        if table is None:
            table = self._tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        self._tied = None
        if self._quantization == "int4":
            return self._gains(gains), self._int8_linear(table[:num_rows], None, _ACTIVATION_GROUP, torch.float32)
        if self._quantization == "fp8":
            return self._gains(gains), self._plain_linear(table[:num_rows].to(self._dtype), None, torch.float32)
        return self._behind_norm(gains, table[:num_rows], None, out_dtype=torch.float32)

    def _reading(self, norm: str, parts: list[tuple[str, int]], *, bias: bool) -> tuple[Tensor, Linear]:
        """A norm of the residual stream and the layer behind it, of one or more whose outputs stand side by side."""
        width = self._config.hidden_size
        gains = self._tensor(norm, width)
        biases = torch.cat([self._tensor(f"{name}.bias", out) for name, out in parts]) if bias else None
        if self._quantization == "int4":
            groups = Int4Weight.stack([self._int4(f"{name}.weight", out, width) for name, out in parts])
            return self._gains(gains), self._int4_linear(groups, biases)
        weight = torch.cat([self._tensor(f"{name}.weight", out, width) for name, out in parts])
        return self._behind_norm(gains, weight, biases)

    def _behind_norm(
        self, gains: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Linear]:
        if self._rotation is None:
            return self._gains(gains), self._unrotated_linear(weight, bias, out_dtype)
        folded = self._rotation.rotate(weight * gains)
        ones = torch.ones_like(gains, dtype=self._dtype, device=self._backend.device)
        return ones, self._int8_linear(folded, bias, None, out_dtype)

    def _writing(self, name: str, in_features: int, *, bias: bool) -> Linear:
        """A layer whose output is added to the residual stream."""
        width = self._config.hidden_size
        biases = self._tensor(f"{name}.bias", width) if bias else None
        if self._quantization == "int4":
            return self._int4_linear(self._int4(f"{name}.weight", width, in_features), biases)
        weight = self._tensor(f"{name}.weight", width, in_features)
        if self._rotation is None:
            return self._unrotated_linear(weight, biases)
        biases = None if biases is None else self._rotation.rotate(biases)
        return self._int8_linear(self._rotation.rotate(weight, dim=0), biases, _ACTIVATION_GROUP)

    def _unrotated_linear(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        """Of the model's dtype, or of e4m3."""
        if self._quantization == "none":
            return self._plain_linear(weight, bias, out_dtype)
        return self._made(self._backend.fp8_linear, weight, bias, dtype=self._dtype, out_dtype=out_dtype)

    def _plain_linear(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        return self._made(self._backend.linear, weight, bias, out_dtype=out_dtype)

    def _int8_linear(
        self, weight: Tensor, bias: Tensor | None, group: int | None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        make = self._backend.int8_linear
        return self._made(make, weight, bias, dtype=self._dtype, group=group, out_dtype=out_dtype)

    def _int4_linear(self, weight: Int4Weight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        return self._made(self._backend.int4_linear, weight, bias, dtype=self._dtype, out_dtype=out_dtype)

    def _made(
        self, make: Callable[..., Linear], weight: Tensor | Int4Weight, bias: Tensor | None, **options: Any
    ) -> Linear:
        """A layer of one of the backend's kinds, made on its device."""
        device = self._backend.device
        return make(weight.to(device), None if bias is None else bias.to(device), **options)

    def _int4(self, name: str, out_features: int, in_features: int) -> Int4Weight:
        """The file's own groups, or the file's values rounded to such."""
        stored = self._weights.get_int4(name, (out_features, in_features))
        if stored is None:
            return quantize_int4(self._tensor(name, out_features, in_features))
        self.num_parameters += stored.integers.numel()
        return stored

    def _gains(self, gains: Tensor) -> Tensor:
        return gains.to(self._backend.device, self._dtype)

    def _head_norm(self, name: str) -> Tensor | None:
        if not self._config.qk_norm:
            return None
        return self._tensor(name, self._config.head_dim).to(self._backend.device, self._dtype)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._weights.get(name, shape, self._read_dtype)
        self.num_parameters += tensor.numel()
        return tensor
