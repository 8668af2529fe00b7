"""Small tokenizers of the kinds that models have, trained on the spot, and texts that are hard to cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from octavo_router.tokenizer import Tokenizer

HARD_TEXTS = [
    "The capital of France is Paris.",
    "東京は日本の首都です。日本語のテキスト。",
    "Flags 🇫🇷🇯🇵🏴󠁧󠁢󠁥󠁮󠁧󠁿 and a family 👨‍👩‍👧‍👦, a thumb 👍🏽.",
    "e\u0301a\u0308 café naïve",
    "Привет, мир! שלום عليكم",
    "def f(x):\n    return x ** 2\n\n\n",
    "  two  spaces   three \t tab ",
]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level(kept_bytes: int = 256) -> Tokenizer:
    """A byte-level BPE as SmolLM2 has it: special ids 0 to 2, and added tokens that are not special.

    kept_bytes: how many of the 256 bytes the vocabulary has.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:kept_bytes]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(HARD_TEXTS * 3, trainer)
    # What an added token spells is bytes if it can be read as such ("ÿ" is the byte 0xFF), else the text itself.
    backend.add_tokens([AddedToken("<tool>"), AddedToken("ÿ"), AddedToken("two words")])
    return Tokenizer(
        backend.to_str().encode(),
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        eos_token_ids=[2],
    )


@cache
def sentencepiece(kind: str = "llama") -> Tokenizer:
    """A BPE with byte fallback. kind: "llama" strips the space at the start, "gemma" does not, "metaspace" and
    "metaspace-bytes" use the Metaspace decoder."""
    pieces = Backend(models.BPE())
    pieces.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    pieces.train_from_iterator([text for text in HARD_TEXTS if text.isascii()] * 5, trainer)
    trained = json.loads(pieces.to_str())["model"]
    specials = ["<unk>", "<s>", "</s>"]
    vocabulary = specials + [f"<0x{byte:02X}>" for byte in range(256)] + list(trained["vocab"])
    vocab = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    merges = [tuple(merge) for merge in trained["merges"]]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = decoders.Replace("▁", " ")
    chains: dict[str, list[Any]] = {
        "llama": [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        "gemma": [space, decoders.ByteFallback(), decoders.Fuse()],
        "metaspace": [decoders.Metaspace()],
        "metaspace-bytes": [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()],
        "strip-each": [space, decoders.ByteFallback(), decoders.Strip(" ", 1, 0)],
    }
    prepended = [] if kind == "gemma" else [normalizers.Prepend("▁")]
    backend.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", "▁")])
    backend.decoder = chains[kind][0] if len(chains[kind]) == 1 else decoders.Sequence(chains[kind])
    backend.add_special_tokens(specials)
    backend.add_tokens([AddedToken("[TOOL]"), AddedToken("▁▁▁x")])
    return Tokenizer(backend.to_str().encode(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@cache
def word_level() -> Tokenizer:
    """Words without a decoder: tokens are joined by spaces."""
    vocab = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "cc": 4, "": 5}
    backend = Backend(models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend.to_str().encode())


def with_regex_decoder() -> bytes:
    """A tokenizer.json whose decoder cannot be known to be final token by token."""
    backend = Backend(models.BPE())
    backend.decoder = decoders.Replace(Regex(r"\s+"), " ")
    return backend.to_str().encode()


ALL: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "llama": sentencepiece,
    "gemma": lambda: sentencepiece("gemma"),
    "metaspace": lambda: sentencepiece("metaspace"),
    "metaspace-bytes": lambda: sentencepiece("metaspace-bytes"),
    "strip-each": lambda: sentencepiece("strip-each"),
    "word-level": word_level,
}
