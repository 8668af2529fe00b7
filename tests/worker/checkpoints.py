"""Writes tiny models for the worker's tests: safetensors folders and GGUF files, always with the same weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.tokenizer import TokenizerBundle

FloatArray = NDArray[np.float32]
VOCAB_SIZE = 96
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """The content of a config.json; an override of None takes a key out."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": None,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config.update(overrides)
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def tiny_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers writes for a config."""
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_width, kv_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    family = config["model_type"]
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, out, size in (("q", q_width, width), ("k", kv_width, width), ("v", kv_width, width)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (out, size)
            if qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (out,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (width, q_width)
        if config.get("attention_bias", False):
            shapes[f"{prefix}self_attn.o_proj.bias"] = (width,)
        for name, out, size in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = (out, size)
            if config.get("mlp_bias", False):
                shapes[f"{prefix}mlp.{name}_proj.bias"] = (out,)
        if family == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def tiny_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, FloatArray]:
    """Random weights. RandomState's stream is frozen, so they are the same on every machine."""
    random = np.random.RandomState(seed)
    weights: dict[str, FloatArray] = {}
    for name, shape in tiny_shapes(config).items():
        values = random.standard_normal(shape) * (0.2 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5)
        if name.endswith("norm.weight"):
            values += 1
        weights[name] = values.astype(np.float32)
    return weights


def write_safetensors(path: Path, tensors: Mapping[str, FloatArray]) -> None:
    """Writes F32 tensors in the safetensors format."""
    header: dict[str, Any] = {}
    offset = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    path.write_bytes(struct.pack("<Q", len(content)) + content + b"".join(t.tobytes() for t in tensors.values()))


def tokenizer_content(size: int) -> dict[str, Any]:
    """A tokenizer.json of `size` tokens: two special ones and single characters."""
    texts = ["<s>", "</s>", *(chr(0x100 + index) for index in range(size - 2))]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": texts[index], **added} for index in range(2)],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {text: index for index, text in enumerate(texts)}, "merges": []},
    }


def letter_tokenizer(eos_token_ids: Sequence[int] = (0, 1)) -> TokenizerBundle:
    """A byte-level tokenizer of 96 tokens: two special ones, and one for each character from "!" to "~"."""
    content = tokenizer_content(VOCAB_SIZE)
    content["model"]["vocab"] = {"<s>": 0, "</s>": 1} | {chr(0x21 + index): index + 2 for index in range(94)}
    content["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    defaults = pb.TokenizerDefaults(eos_token_ids=eos_token_ids)
    return TokenizerBundle(json.dumps(content).encode(), defaults, VOCAB_SIZE)


def letters_to_ids(text: str) -> list[int]:
    """The tokens of a text for `letter_tokenizer`."""
    return [ord(letter) - 0x21 + 2 for letter in text]


def ids_to_letters(token_ids: Iterable[int]) -> str:
    """Their text; "$" for an end of sequence."""
    return "".join("$" if token_id < 2 else chr(token_id - 2 + 0x21) for token_id in token_ids)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    *,
    weights: Mapping[str, FloatArray] | None = None,
    num_shards: int = 1,
    tokenizer_size: int = VOCAB_SIZE,
) -> Path:
    """Writes a folder that a worker can load."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tiny_weights(config) if weights is None else weights
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_content(tokenizer_size)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    mapping: dict[str, str] = {}
    for index in range(num_shards):
        file = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        part = names[index::num_shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        mapping.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return folder


_GGUF_LAYER = {
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


def gguf_tensors(config: Mapping[str, Any], weights: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """The weights under llama.cpp's names, with the rows of llama's q and k interleaved as its converter does."""
    tensors: dict[str, FloatArray] = {}
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, values in weights.items():
        if name in plain:
            tensors[plain[name]] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        base, kind = rest.rsplit(".", 1)
        if config["model_type"] == "llama" and base in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in base else "num_key_value_heads"]
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        tensors[f"blk.{layer}.{_GGUF_LAYER[base]}.{kind}"] = values
    return tensors


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's values under llama.cpp's keys."""
    kind = config["model_type"]
    return {
        "general.architecture": kind,
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.embedding_length": config["hidden_size"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.attention.head_count": config["num_attention_heads"],
        f"{kind}.attention.head_count_kv": config["num_key_value_heads"],
        f"{kind}.attention.key_length": config["head_dim"],
        f"{kind}.attention.value_length": config["head_dim"],
        f"{kind}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{kind}.rope.freq_base": float(config["rope_theta"]),
        f"{kind}.rope.dimension_count": config["head_dim"],
        f"{kind}.vocab_size": config["vocab_size"],
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, FloatArray] | None = None,
    *,
    raw: Mapping[str, tuple[Sequence[int], int, bytes]] | None = None,
) -> Path:
    """Writes a GGUF file, version 3. Tensors are F32; `raw` ones are (shape, ggml type, bytes)."""
    items = {name: (values.shape, 0, values.tobytes()) for name, values in (tensors or {}).items()} | dict(raw or {})
    out = [b"GGUF", struct.pack("<IQQ", 3, len(items), len(metadata))]
    for key, value in metadata.items():
        out += [_gguf_string(key), _gguf_value(value)]
    offset = 0
    for name, (shape, kind, content) in items.items():
        out += [_gguf_string(name), struct.pack("<I", len(shape))]
        out += [struct.pack("<Q", size) for size in reversed(shape)]
        out.append(struct.pack("<IQ", kind, offset))
        offset += -(-len(content) // 32) * 32
    head = b"".join(out)
    body = b"".join(content + b"\0" * (-len(content) % 32) for _, _, content in items.values())
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


def _gguf_string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _gguf_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _gguf_string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_gguf_string, value))
    kind, code = (6, "f") if isinstance(value[0], float) else (5, "i")
    return struct.pack("<IIQ", 9, kind, len(value)) + struct.pack(f"<{len(value)}{code}", *value)
