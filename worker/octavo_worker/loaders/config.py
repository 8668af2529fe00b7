"""A model's shape, read from Hugging Face's config.json.

Every supported family is one `ModelConfig`; the decoder asks for nothing else. What a config asks for and the decoder
does not do is refused here by name. GGUF metadata is mapped to the same class by `gguf_config`. No torch in here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelLoadError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_KV_DTYPES = ("int8", "fp8_e4m3")
KV_SCALE_BYTES = 4  # beside K, and beside V, of a token and head in 8 bits


@dataclass(frozen=True)
class RopeConfig:
    """How positions are rotated into queries and keys (Su et al., RoFormer).

    kind: "default", "linear" (Chen et al., 2023), "dynamic" (NTK-aware, by length), "yarn" (Peng et al., 2023),
    "llama3", or "factors": each frequency is divided by its entry of `frequency_factors`.
    original_max_len: the length that the model was trained with before scaling.
    attention_factor: cosines and sines are multiplied by it.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_len: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder-only transformer of the llama family.

    sliding_windows: one entry a layer, the tokens that a token sees, itself included; None for all before it.
    qkv_bias, output_bias, mlp_bias: which linear layers have biases. qk_norm: queries and keys are normed per head.
    dtype: the checkpoint's own, "" if it does not say. eos_token_ids: as the config names them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str = ""
    eos_token_ids: tuple[int, ...] = ()

    def validate(self, where: str) -> None:
        """Raises ModelLoadError that names the first value which cannot be; `where` is the file it came from."""
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_model_len",
        ):  # fmt: skip
            if getattr(self, key) < 1:
                raise ModelLoadError(f"{where}: {key} is {getattr(self, key)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{where}: {self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"{where}: head_dim is {self.head_dim}; rotary positions need an even one")
        if len(self.sliding_windows) != self.num_layers:
            raise ModelLoadError(f"{where}: {len(self.sliding_windows)} attention types for {self.num_layers} layers")
        for window in self.sliding_windows:
            if window is not None and window < 1:
                raise ModelLoadError(f"{where}: sliding_window is {window}; it must be at least 1")
        if self.rms_norm_eps < 0 or self.rope.theta <= 0:
            raise ModelLoadError(
                f"{where}: rms_norm_eps is {self.rms_norm_eps} and rope_theta {self.rope.theta}; "
                f"neither may be negative, nor rope_theta 0"
            )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token over all layers: 2 * layers * KV heads * head dim * bytes of the dtype.

        dtype: also one of QUANTIZED_KV_DTYPES, in which a head takes a byte for each value, and a scale.
        """
        is_quantized = dtype in QUANTIZED_KV_DTYPES
        head = self.head_dim + KV_SCALE_BYTES if is_quantized else self.head_dim * DTYPE_BYTES[dtype]
        return 2 * self.num_layers * self.num_kv_heads * head


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelLoadError when it cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def config_from_hf(values: Mapping[str, Any], where: str) -> ModelConfig:
    """A config from the content of config.json, in the style of transformers 4 or 5.

    `where` is the file's name for messages. Raises ModelLoadError for a missing or impossible value and for what the
    decoder does not do: other architectures, activations, rope types, quantized weights.
    """
    architecture = _architecture(values, where)
    _refuse_unsupported(values, where)
    reader = Numbers(values, where)
    num_layers = reader.integer("num_hidden_layers")
    num_heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    qwen2, qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
    head_dim = reader.integer("head_dim", 0) or (128 if qwen3 else hidden_size // max(num_heads, 1))
    max_positions = reader.integer("max_position_embeddings")
    rope = _rope_from_hf(reader, max_positions)
    attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(values.get("attention_bias"))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", num_heads if architecture.startswith("Llama") else None),
        head_dim=head_dim,
        max_model_len=scaled_max_len(rope, max_positions),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        sliding_windows=_sliding_windows(reader, architecture, num_layers),
        qkv_bias=attention_bias or qwen2,
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(values.get("mlp_bias")),
        qk_norm=qwen3,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "").removeprefix("torch."),
        eos_token_ids=token_ids(values.get("eos_token_id"), where),
    )
    config.validate(where)
    return config


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """The ids of an `eos_token_id` entry, which is an id, a list of ids or nothing. `where` is its file's name."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 1 << 32:
            raise ModelLoadError(f"{where}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(ids)


def scaled_max_len(rope: RopeConfig, max_positions: int) -> int:
    """The longest sequence: what the config says, or the original length times the factor where scaling derives it."""
    if rope.kind in ("linear", "dynamic", "yarn"):
        return max(max_positions, math.floor(rope.original_max_len * rope.factor))
    return max_positions


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Attention scale of YaRN (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class Numbers:
    """Typed reads of a JSON object's numbers; null counts as missing. `where` is the object's file, for messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises ModelLoadError when the value is something else, or is missing without a default."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(f"{self.where}: {key} is {value!r}; it must be a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """Raises ModelLoadError when the value is something else or not finite."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(f"{self.where}: {key} is {value!r}; it must be a number")
        return float(value)


def _architecture(values: Mapping[str, Any], where: str) -> str:
    names = values.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name not in SUPPORTED_ARCHITECTURES:
        raise ModelLoadError(
            f"{where}: architecture {name or values.get('model_type')!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return str(name)


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"{where}: hidden_act {activation!r} is not supported; supported is 'silu'")
    if values.get("quantization_config"):
        kind = _quantization(values["quantization_config"])
        raise ModelLoadError(
            f"{where}: weights quantized by {kind} are not supported; load the model they were made from, "
            f"or a GGUF file of it"
        )
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if values.get(key):
            raise ModelLoadError(f"{where}: {key} is {values[key]}; mixtures of experts are not supported")


def _quantization(config: Any) -> str:
    """How weights are quantized, in the config's own words: the method and, where it says, its format."""
    if not isinstance(config, Mapping):
        return repr(config)
    words = [config.get("quant_method", "unknown"), config.get("version"), config.get("checkpoint_format")]
    return " ".join(repr(word) for word in words if word is not None)


def _sliding_windows(reader: Numbers, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window. Mistral: all layers. Qwen: those that `layer_types`, or else `max_window_layers`, name."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    values = reader.values
    none = values.get("sliding_window", 4096) is None
    window = None if none else reader.integer("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not values.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    kinds = values.get("layer_types")
    if kinds is None:
        first = reader.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list):
        raise ModelLoadError(f"{reader.where}: layer_types is {kinds!r}; it must be a list")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ModelLoadError(f"{reader.where}: layer type {kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_from_hf(reader: Numbers, max_positions: int) -> RopeConfig:
    """The rope part: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of transformers 4."""
    values, where = reader.values, reader.where
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelLoadError(f"{where}: rope parameters that differ between layers are not supported: {given}")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelLoadError(f"{where}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    partial = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelLoadError(f"{where}: partial_rotary_factor {partial} is not supported; supported is 1.0")
    scaling = Numbers(given, f"{where}: rope parameters")
    theta = scaling.number("rope_theta", 0) or reader.number("rope_theta", 0) or 10_000.0
    if kind == "default":
        return RopeConfig(theta=theta, original_max_len=max_positions)
    key = "original_max_position_embeddings"
    original_max_len = reader.integer(key, 0) or scaling.integer(key, 0) or max_positions
    if kind == "dynamic":
        original_max_len = max_positions  # the formula is defined by max_position_embeddings
    if original_max_len < 1:
        raise ModelLoadError(f"{where}: {key} is {original_max_len}; it must be at least 1")
    factor = scaling.number("factor", max_positions / original_max_len if kind == "yarn" else 0)
    if factor <= 0:
        raise ModelLoadError(f"{where}: rope type {kind!r} needs a positive factor, and it is {given.get('factor')!r}")
    return RopeConfig(
        theta=theta,
        kind=str(kind),
        factor=factor,
        original_max_len=original_max_len,
        attention_factor=_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        low_freq_factor=scaling.number("low_freq_factor", 1),
        high_freq_factor=scaling.number("high_freq_factor", 4),
        beta_fast=scaling.number("beta_fast", 0) or 32.0,
        beta_slow=scaling.number("beta_slow", 0) or 1.0,
        truncate=bool(given.get("truncate", True)),
    )


def _attention_factor(scaling: Numbers, factor: float) -> float:
    mscale, all_dim = scaling.number("mscale", 0), scaling.number("mscale_all_dim", 0)
    derived = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if mscale and all_dim else yarn_mscale(factor)
    return scaling.number("attention_factor", derived)
