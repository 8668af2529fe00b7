from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from octavo.errors import ModelLoadError
from octavo_worker.loaders.gguf import GGUFFile
from octavo_worker.loaders.gguf_tokenizer import byte_alphabet
from octavo_worker.tokenizer import bundle_from_gguf
from tests.worker.cases import TEXTS, VOCABULARIES, byte_level_metadata, plain_vocabulary, spm_metadata
from tests.worker.checkpoints import write_gguf

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text())


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_str(bundle_from_gguf(GGUFFile(path)).tokenizer_json.decode())


@pytest.mark.parametrize("name", VOCABULARIES)
def test_token_ids_equal_those_of_transformers(name: str, default_model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", VOCABULARIES[name](default_model))
    tokenizer = tokenizer_of(path)
    for text, expected in zip(TEXTS, EXPECTED[name], strict=True):
        assert tokenizer.encode(text).ids == expected, text


def test_default_model_tokenizes_as_its_vocabulary_does(default_model: Path) -> None:
    tokenizer = tokenizer_of(default_model)
    for text, expected in zip(TEXTS, EXPECTED["smollm"], strict=True):
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected, skip_special_tokens=False) == text


def test_defaults_of_the_default_model(default_model: Path) -> None:
    bundle = bundle_from_gguf(GGUFFile(default_model))
    assert bundle.size == 49152
    assert bundle.defaults.eos_token_ids == [2]
    assert bundle.defaults.bos_token == "<|im_start|>"
    assert bundle.defaults.eos_token == "<|im_end|>"
    assert dict(bundle.defaults.special_tokens) == {"unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"}
    assert "<|im_start|>" in bundle.defaults.chat_template
    assert not bundle.defaults.HasField("temperature")
    assert len(bundle.digest) == 64


def test_sentencepiece_decodes_bytes_and_spaces(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_gguf(tmp_path / "model.gguf", spm_metadata(96)))
    for text in ("Hello world", "the capital  of France", "日本🙂"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_space_prefix_can_be_switched_off(tmp_path: Path) -> None:
    metadata = spm_metadata(96) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = tokenizer_of(write_gguf(tmp_path / "model.gguf", metadata))
    assert tokenizer.encode("Hello", add_special_tokens=False).tokens == ["Hello"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type is 2 values; it must be a number for each of 40"),
        ({"tokenizer.ggml.token_type": ["x"] * 40}, "token_type is 40 values; it must be a number"),
        ({"tokenizer.ggml.merges": ["! !", "!!"]}, r"item 1 of metadata tokenizer\.ggml\.merges is not a pair"),
        ({"tokenizer.ggml.merges": [1, 2]}, r"metadata tokenizer\.ggml\.merges is not a pair"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 40},
            "bos_token_id is 40; the vocabulary has 40 tokens",
        ),
        ({"tokenizer.chat_template": 5}, "chat_template is 5; it must be a text"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", plain_vocabulary(40) | change)
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_of(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.unknown_token_id": 1 << 31}, "unknown_token_id is 2147483648"),
        ({"tokenizer.ggml.scores": ["x"]}, "scores is 1 values; it must be a number for each"),
        ({"tokenizer.ggml.scores": 5}, "scores is 5; it must be a number for each"),
    ],
)
def test_broken_sentencepiece_vocabularies(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", spm_metadata(96) | change)
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_of(path)


def test_byte_alphabet_is_a_bijection_with_gpt2s_space() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert (alphabet[ord(" ")], alphabet[ord("\n")], alphabet[ord("A")]) == ("Ġ", "Ċ", "A")


def test_helper_reads_the_whole_vocabulary(default_model: Path) -> None:
    assert len(byte_level_metadata("smollm")(default_model)["tokenizer.ggml.tokens"]) == 49152
