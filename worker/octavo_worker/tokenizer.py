"""What a router gets to tokenize with: the bytes of a tokenizer.json and the model's defaults.

The worker itself never tokenizes. It takes the files of a checkpoint's folder as they are, or converts the vocabulary
of a GGUF file (`loaders.gguf_tokenizer`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.errors import ModelLoadError
from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.loaders.config import Numbers, read_json, token_ids
from octavo_worker.loaders.gguf import GGUFFile
from octavo_worker.loaders.gguf_tokenizer import tokenizer_from_gguf

_SPECIAL_NAMES = ("unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerBundle:
    """A tokenizer's file and defaults. size: one more than the highest token id."""

    tokenizer_json: bytes
    defaults: pb.TokenizerDefaults
    size: int

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, over the file and the defaults."""
        digest = hashlib.sha256(self.tokenizer_json)
        digest.update(self.defaults.SerializeToString(deterministic=True))
        return digest.hexdigest()


def bundle_from_gguf(file: GGUFFile) -> TokenizerBundle:
    """The tokenizer in a GGUF file. Raises ModelLoadError for a kind that is not supported."""
    content = tokenizer_from_gguf(file)
    metadata = file.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]

    def text(key: str) -> str:
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        return tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(tokens) else ""

    ends = {metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id", "eom_token_id")}
    specials = {"unk_token": text("unknown_token_id"), "pad_token": text("padding_token_id")}
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise ModelLoadError(f"{file.path}: metadata tokenizer.chat_template is {template!r}; it must be a text")
    defaults = pb.TokenizerDefaults(
        chat_template=template,
        eos_token_ids=sorted(end for end in ends if isinstance(end, int) and 0 <= end < len(tokens)),
        bos_token=text("bos_token_id"),
        eos_token=text("eos_token_id"),
        special_tokens={name: value for name, value in specials.items() if value},
    )
    return TokenizerBundle(_dump(content), defaults, len(tokens))


def bundle_from_folder(folder: Path, config_eos_ids: Iterable[int]) -> TokenizerBundle:
    """The tokenizer in a checkpoint's folder. Raises ModelLoadError when there is no tokenizer.json.

    config_eos_ids: the ids that config.json names; those of generation_config.json and the tokenizer's own are added.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = "; tokenizer.model alone is not read, convert it to tokenizer.json first"
        raise ModelLoadError(
            f"{folder}: tokenizer.json is missing{other if (folder / 'tokenizer.model').exists() else ''}"
        )
    content = read_json(path)
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    ids = _token_ids_by_text(content, path)
    eos_token = _token_text(settings.get("eos_token"))
    eos_ids = {*config_eos_ids, *token_ids(generation.get("eos_token_id"), str(folder / "generation_config.json"))}
    if eos_token in ids:
        eos_ids.add(ids[eos_token])
    specials = {name: _token_text(settings.get(name)) for name in _SPECIAL_NAMES}
    defaults = pb.TokenizerDefaults(
        chat_template=_chat_template(folder, settings),
        eos_token_ids=sorted(eos_ids),
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=eos_token,
        special_tokens={name: text for name, text in specials.items() if text},
    )
    _set_sampling_defaults(defaults, Numbers(generation, str(folder / "generation_config.json")))
    return TokenizerBundle(path.read_bytes(), defaults, max(ids.values(), default=-1) + 1)


def _set_sampling_defaults(defaults: pb.TokenizerDefaults, generation: Numbers) -> None:
    """Takes temperature, top_p and top_k of a generation_config.json, which hold only where `do_sample` is set."""
    given = {key for key, value in generation.values.items() if value is not None}
    if not generation.values.get("do_sample"):
        return
    if "temperature" in given:
        defaults.temperature = generation.number("temperature", 0)
    if "top_p" in given:
        defaults.top_p = generation.number("top_p", 0)
    if "top_k" in given:
        defaults.top_k = generation.integer("top_k")


def _token_text(value: Any) -> str:
    """The text of a special token's entry: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _token_ids_by_text(content: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Every token of a tokenizer.json: its model's vocabulary and the added tokens."""
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [text, score] in the order of ids
            ids = {str(item[0]): index for index, item in enumerate(vocabulary)}
        else:
            ids = {str(text): int(token_id) for text, token_id in vocabulary.items()}
        ids.update({str(item["content"]): int(item["id"]) for item in content.get("added_tokens") or []})
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: holds no vocabulary that can be read: {error!r}") from None
    return ids


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """The template of chat_template.jinja or tokenizer_config.json; of several named ones the "default" one."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path}: cannot be read: {error}") from None
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {str(item.get("name")): str(item.get("template", "")) for item in template}
        return named.get("default") or next(iter(named.values()), "")
    return str(template)


def _dump(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
