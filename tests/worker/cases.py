"""Cases that `tests/references/make_worker_references.py` computes with transformers, and the tests with the worker."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.worker.checkpoints import tiny_config

# 80 tokens: longer than every "original" length and every window below.
PROMPT = [(7 * index * index + 3 * index + 5) % 96 for index in range(80)]


def gguf_case(family: str) -> dict[str, Any]:
    """The config of the model that is written both as safetensors and as GGUF."""
    return tiny_config(family, tie_word_embeddings=family == "qwen2")


def _scaled(family: str = "llama", *, positions: int = 32, key: str = "rope_type", **scaling: Any) -> dict[str, Any]:
    kind = scaling.pop("kind")
    return tiny_config(family, max_position_embeddings=positions, rope_scaling={key: kind, **scaling})


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MODEL_CASES: dict[str, dict[str, Any]] = {
    "llama": tiny_config(),
    "llama-tied": tiny_config(tie_word_embeddings=True),
    "llama-biases": tiny_config(attention_bias=True, mlp_bias=True),
    "mistral-window": tiny_config("mistral", sliding_window=16),
    "qwen2": tiny_config("qwen2"),
    "qwen2-window": tiny_config("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1),
    "qwen3": tiny_config("qwen3", tie_word_embeddings=True),
    "qwen3-window": tiny_config(
        "qwen3",
        sliding_window=16,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "linear": _scaled(kind="linear", factor=4.0),
    "linear-old-key": _scaled(kind="linear", factor=4.0, key="type"),
    "dynamic": _scaled(kind="dynamic", factor=4.0),
    "yarn": _scaled(kind="yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn-attention-factor": _scaled(
        "qwen2", kind="yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3, beta_fast=16
    ),
    "llama3": _scaled(kind="llama3", factor=4.0, positions=128, **_LLAMA3),
    "rope-parameters": tiny_config(
        max_position_embeddings=32,
        rope_theta=None,
        rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    ),
    "head-dim-32": tiny_config(head_dim=32),
    "head-dim-80": tiny_config(head_dim=80),
    "head-dim-96": tiny_config(head_dim=96),
    "head-dim-100": tiny_config(head_dim=100),
    "gguf-llama": gguf_case("llama"),
    "gguf-qwen2": gguf_case("qwen2"),
    "gguf-qwen3": gguf_case("qwen3"),
}

TEXTS = [
    "Hello world",
    "The capital of France is Paris.",
    "  two  spaces",
    "it's we'll I'D don't",
    "1234567890 12,345.67",
    "\n\n1. item\n    2 x",
    "x =  2\n\n3",
    "naïve café Zürich",
    "日本語のテキスト、中国文字",
    "한국어 문장입니다",
    "🙂👨‍👩‍👧‍👦🇩🇪🏳️‍🌈",
    "def f(x):\n\treturn x**2 + 10_000 # 3.14\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<s>b</s> c",
    "Привет мир العربية हिन्दी ไทย",
    "\u0000\u0007\x7f\r\n\t",
    "e\u0301 vs é",
    "٣٤٥ ½ Ⅷ",
    "",
    "   ",
]


def spm_metadata(size: int) -> dict[str, Any]:
    """A small sentencepiece vocabulary with byte fallback, in GGUF's keys; `size` tokens or more."""
    tokens, scores, kinds = ["<unk>", "<s>", "</s>"], [0.0, 0.0, 0.0], [2, 3, 3]
    for byte in range(256):
        tokens.append(f"<0x{byte:02X}>")
        scores.append(0.0)
        kinds.append(6)
    words = [
        "▁the",
        "▁capital",
        "▁of",
        "▁France",
        "▁is",
        "▁Paris",
        "Hello",
        "▁Hello",
        "▁world",
        "ell",
        "lo",
        "▁▁",
        "ca",
    ]
    pieces: list[str] = []
    for word in words:
        pieces += [word[:end] for end in range(2, len(word) + 1)]
    for rank, piece in enumerate(dict.fromkeys(pieces)):
        tokens.append(piece)
        scores.append(-float(rank))
        kinds.append(1)
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,é日"
    for rank, letter in enumerate(letters):
        tokens.append(letter)
        scores.append(-1000.0 - rank)
        kinds.append(1)
    while len(tokens) < size:
        tokens.append(f"<extra_{len(tokens)}>")
        scores.append(-5000.0)
        kinds.append(4)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def plain_vocabulary(size: int) -> dict[str, Any]:
    """A byte-level vocabulary of exactly `size` tokens without merges, in GGUF's keys."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", *(chr(0x21 + index) for index in range(size - 2))],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (size - 2),
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def byte_level_metadata(pre: str) -> Callable[[Path], dict[str, Any]]:
    """The default model's vocabulary under another pre-tokenizer's name, in GGUF's keys."""

    def metadata_of(model: Path) -> dict[str, Any]:
        content = model.read_bytes()
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": _strings(content, "tokenizer.ggml.tokens"),
            "tokenizer.ggml.token_type": [3] * 17 + [1] * (49152 - 17),
            "tokenizer.ggml.merges": _strings(content, "tokenizer.ggml.merges"),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
        }

    return metadata_of


def _strings(content: bytes, key: str) -> list[str]:
    """An array of strings in a GGUF file, found by its key: independent of the reader under test."""
    name = key.encode()
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    kind, item, count = struct.unpack_from("<IIQ", content, at)
    assert (kind, item) == (9, 8)
    at += 16
    items = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", content, at)
        items.append(content[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return items


VOCABULARIES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "smollm": byte_level_metadata("smollm"),
    "llama-bpe": byte_level_metadata("llama-bpe"),
    "qwen2": byte_level_metadata("qwen2"),
    "tekken": byte_level_metadata("tekken"),
    "sentencepiece": lambda _: spm_metadata(96),
}
