"""Maps GGUF metadata and tensor names to the config and the tensor names that Hugging Face's checkpoints have.

Keys are llama.cpp's (gguf.md, "Standardized key-value pairs"). The bytes are read by `gguf`.
"""

from __future__ import annotations

import math
import re
from typing import Any

from octavo.errors import ModelLoadError
from octavo_worker.loaders.config import ModelConfig, RopeConfig, scaled_max_len, token_ids, yarn_mscale
from octavo_worker.loaders.gguf import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MODEL_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_tensor_name(name: str) -> str:
    """The name in a GGUF file of a tensor of a Hugging Face checkpoint."""
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    match = _LAYER_NAME.fullmatch(name)
    assert match is not None, name
    return f"blk.{match[1]}.{_LAYER_TENSORS[match[2]]}.{match[3]}"


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """A config from a file's metadata. Raises ModelLoadError for a missing key and for what the decoder does not do."""
    reader = _Reader(file)
    kind = file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {kind!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    experts = reader.integer("expert_count", 0)
    if experts:
        raise ModelLoadError(f"{file.path}: {kind}.expert_count is {experts}; mixtures of experts are not supported")
    parts = file.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise ModelLoadError(
            f"{file.path}: is one of {parts} parts of a split model; join them first with `llama-gguf-split --merge`"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    hidden_size, num_heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    num_layers = reader.integer("block_count")
    head_dim = reader.integer("attention.key_length", hidden_size // max(num_heads, 1))
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path}: {kind}.attention.value_length differs from the key length {head_dim}")
    if reader.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path}: {kind}.rope.dimension_count differs from the head dimension {head_dim}")
    context_length = reader.integer("context_length")
    rope = _rope(reader, context_length, head_dim)
    window = reader.integer("attention.sliding_window", 0) or None
    first = "blk.0."
    config = ModelConfig(
        architecture=ARCHITECTURES[str(kind)],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=reader.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=reader.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_model_len=scaled_max_len(rope, context_length),
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope=rope,
        sliding_windows=(window,) * num_layers,
        qkv_bias=first + "attn_q.bias" in file.tensors,
        output_bias=first + "attn_output.bias" in file.tensors,
        mlp_bias=first + "ffn_down.bias" in file.tensors,
        qk_norm=first + "attn_q_norm.weight" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype="bfloat16",
        eos_token_ids=token_ids(file.metadata.get("tokenizer.ggml.eos_token_id"), str(file.path)),
    )
    config.validate(str(file.path))
    return config


class _Reader:
    """Reads keys below the architecture's name."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            shown = "missing" if value is None else f"{value!r}, which is not one whole number"
            raise ModelLoadError(f"{self.file.path}: metadata {self.prefix}.{key} is {shown}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelLoadError(
                f"{self.file.path}: metadata {self.prefix}.{key} is {value!r}, which is not one number"
            )
        return float(value)


def _rope(reader: _Reader, context_length: int, head_dim: int) -> RopeConfig:
    theta = reader.number("rope.freq_base", 10_000.0)
    kind = reader.get("rope.scaling.type", "none")
    if ROPE_FACTORS in reader.file.tensors:
        factors = reader.file.floats(ROPE_FACTORS)
        if len(factors) != head_dim // 2:
            raise ModelLoadError(
                f"{reader.file.path}: tensor {ROPE_FACTORS} has {len(factors)} values; expected {head_dim // 2}"
            )
        return RopeConfig(theta=theta, kind="factors", original_max_len=context_length, frequency_factors=factors)
    if kind == "none":
        return RopeConfig(theta=theta, original_max_len=context_length)
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(
            f"{reader.file.path}: rope scaling {kind!r} is not supported; supported are none, linear and yarn"
        )
    factor = reader.number("rope.scaling.factor", 1.0)
    original_max_len = reader.integer("rope.scaling.original_context_length", context_length)
    if factor <= 0 or original_max_len < 1:
        raise ModelLoadError(
            f"{reader.file.path}: rope scaling {kind!r} has factor {factor} and original length {original_max_len}; "
            f"both must be above 0"
        )
    scale = reader.number("rope.scaling.attn_factor", 1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_len=original_max_len,
        attention_factor=yarn_mscale(factor) * scale if kind == "yarn" else 1.0,
    )
