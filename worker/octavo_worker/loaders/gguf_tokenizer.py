"""Converts the vocabulary in a GGUF file's metadata to the content of a tokenizer.json.

Two kinds: "gpt2", byte-level BPE with its merges listed, and "llama", sentencepiece BPE with byte fallback, whose
merges follow from its scores. Both tokenize as transformers does when it reads the same file, but for "smollm", where
every digit stands alone, which transformers leaves out. Other kinds, and pre-tokenizers that are not in the table, are
refused by name: a wrong split gives wrong tokens without any error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.errors import ModelLoadError
from octavo_worker.loaders.gguf import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names of `tokenizer.ggml.pre`. None: the regular expression of GPT-2, which the byte-level pre-tokenizer has built in.
SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "tekken": _TEKKEN_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
# Those that cut out every digit first, as their models were trained: it shows where spaces or lines precede a digit.
SINGLE_DIGITS = frozenset({"smollm"})


def tokenizer_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The content of a tokenizer.json. Raises ModelLoadError for a kind that is not supported or a missing key."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"{file.path}: tokenizer {kind!r} is not supported; supported are gpt2 and llama")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError(f"{file.path}: metadata tokenizer.ggml.tokens is missing")
    types = _numbers(file, "tokenizer.ggml.token_type", len(tokens))
    kinds = [_NORMAL] * len(tokens) if types is None else types
    content = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    content["added_tokens"] = _added_tokens(tokens, kinds, byte_level=kind == "gpt2")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    bos_id = file.token_id("tokenizer.ggml.bos_token_id", len(tokens)) if adds_bos else None
    if bos_id is not None:
        content["post_processor"] = _prepend_token(tokens[bos_id], bos_id)
    return {"version": "1.0", "truncation": None, "padding": None, **content}


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> dict[str, Any]:
    metadata = file.metadata
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ModelLoadError(f"{file.path}: pre-tokenizer {name!r} is not supported; supported are {', '.join(SPLITS)}")
    merges = _listed_merges(file)
    if merges is None:
        raise ModelLoadError(f"{file.path}: metadata tokenizer.ggml.merges is missing")
    split = SPLITS[name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}
    steps: list[dict[str, Any]] = [byte_level]
    if split is not None:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False})
    if name in SINGLE_DIGITS:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return {
        "normalizer": None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(_respelled(tokens), merges),
    }


def _sentencepiece(file: GGUFFile, tokens: Sequence[str]) -> dict[str, Any]:
    metadata = file.metadata
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _listed_merges(file)
    if merges is None:
        scores = _numbers(file, "tokenizer.ggml.scores", len(tokens))
        if scores is None:
            raise ModelLoadError(f"{file.path}: metadata tokenizer.ggml.scores is missing")
        merges = _merges_from_scores(vocabulary, scores)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown_id = file.token_id("tokenizer.ggml.unknown_token_id", len(tokens))
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(vocabulary, merges)
    model.update(fuse_unk=True, byte_fallback=True, unk_token=None if unknown_id is None else tokens[unknown_id])
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "first" if prefix else "never",
            "split": False,
        },
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _numbers(file: GGUFFile, key: str, count: int) -> list[Any] | None:
    """An array of one number a token; None where the file has none. Raises ModelLoadError for anything else."""
    values = file.metadata.get(key)
    if values is None:
        return None
    if not isinstance(values, np.ndarray) or len(values) != count:
        length = f"{len(values)} values" if isinstance(values, np.ndarray | list) else f"{values!r}"
        raise ModelLoadError(f"{file.path}: metadata {key} is {length}; it must be a number for each of {count} tokens")
    numbers: list[Any] = values.tolist()
    return numbers


def _listed_merges(file: GGUFFile) -> list[list[str]] | None:
    """The merges that the file lists; None where it lists none. Raises ModelLoadError when they are no pairs."""
    listed = file.metadata.get("tokenizer.ggml.merges")
    if listed is None:
        return None
    merges = [merge.split(" ", 1) for merge in listed] if isinstance(listed, list) else [[]]
    for index, pair in enumerate(merges):
        if len(pair) != 2:
            raise ModelLoadError(f"{file.path}: item {index} of metadata tokenizer.ggml.merges is not a pair of tokens")
    return merges


def _bpe(vocabulary: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in GPT-2's byte-level BPE: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = [""] * 256
    for byte in printable:
        alphabet[byte] = chr(byte)
    shifted = 256
    for byte in range(256):
        if not alphabet[byte]:
            alphabet[byte] = chr(shifted)
            shifted += 1
    return alphabet


def _respelled(tokens: Sequence[str]) -> dict[str, int]:
    """Token to id. Tokens with characters outside the byte alphabet, which some files hold, are spelled in it."""
    alphabet = byte_alphabet()
    known = frozenset(alphabet)
    return {
        token if known.issuperset(token) else "".join(alphabet[byte] for byte in token.encode("utf-8")): index
        for index, token in enumerate(tokens)
    }


def _merges_from_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Sentencepiece joins the neighbours whose joint token scores highest; so each way to split a token is a merge.

    The order is that of transformers: by score, then the longer left part, then the longer right part, first.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        local = [
            (vocabulary[token[:cut]], vocabulary[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        local.sort(key=lambda item: item[:2])
        found.extend((scores[token_id], cut, len(token) - cut, token[:cut], token[cut:]) for _, _, cut in local)
    found.sort(key=lambda item: item[:3], reverse=True)
    return [[left, right] for _, _, _, left, right in found]


def _added_tokens(tokens: Sequence[str], kinds: Sequence[int], *, byte_level: bool) -> list[dict[str, Any]]:
    """Control tokens are special; tokens that a user defined are matched whole but shown.

    A control token of a byte-level vocabulary that is spelled outside the byte alphabet is one of llama.cpp's
    mislabels, and is left out, as transformers does.
    """
    known = frozenset(byte_alphabet())
    added: list[dict[str, Any]] = []
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind not in (_CONTROL, _USER_DEFINED) or (byte_level and not known.issuperset(token)):
            continue
        added.append(
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
        )
    return added


def _prepend_token(token: str, token_id: int) -> dict[str, Any]:
    first, rest = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, rest],
        "pair": [first, rest, {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
