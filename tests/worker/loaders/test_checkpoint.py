from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo_worker.loaders import checkpoint
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from tests.worker.cases import gguf_case, plain_vocabulary
from tests.worker.checkpoints import (
    gguf_metadata,
    gguf_tensors,
    tiny_config,
    tiny_weights,
    write_checkpoint,
    write_gguf,
)


def opened(folder: Path) -> checkpoint.Checkpoint:
    return open_checkpoint(find_model(str(folder)))


def test_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    """It was a KeyError (BR-107)."""
    weights = tiny_weights(tiny_config())
    del weights["lm_head.weight"]
    write_checkpoint(tmp_path, tiny_config(), weights=weights)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is missing, and config\.json does not tie it"):
        opened(tmp_path)


def test_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read"):
        opened(tmp_path)


def test_config_that_is_not_json(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: is not valid JSON"):
        opened(tmp_path)


@pytest.mark.parametrize("whole_file_bytes", [1 << 20, 0])
def test_digest_follows_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_file_bytes: int) -> None:
    monkeypatch.setattr(checkpoint, "WHOLE_FILE_BYTES", whole_file_bytes)
    config = tiny_config()
    weights = tiny_weights(config)
    first = opened(write_checkpoint(tmp_path / "a", config)).digest()
    assert opened(write_checkpoint(tmp_path / "b", config)).digest() == first
    weights["model.norm.weight"][3] += 1
    assert opened(write_checkpoint(tmp_path / "c", config, weights=weights)).digest() != first
    assert opened(write_checkpoint(tmp_path / "d", config | {"rope_theta": 5.0})).digest() != first
    assert opened(write_checkpoint(tmp_path / "e", config | {"torch_dtype": "bfloat16"})).digest() == first
    assert len(first) == 64


def test_which_weights_are_quantized(tmp_path: Path, default_model: Path) -> None:
    config = gguf_case("llama")
    metadata = gguf_metadata(config) | plain_vocabulary(config["vocab_size"])
    plain = write_gguf(tmp_path / "plain.gguf", metadata, gguf_tensors(config, tiny_weights(config)))
    assert not opened(plain).weights.is_quantized()
    assert not opened(write_checkpoint(tmp_path / "folder", tiny_config())).weights.is_quantized()
    assert opened(default_model).weights.is_quantized()


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(eos_token_id=7))
    generation = {"eos_token_id": [9, 1], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "</s>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    bundle = opened(tmp_path).tokenizer
    assert bundle.size == 96
    assert bundle.tokenizer_json == (tmp_path / "tokenizer.json").read_bytes()
    defaults = bundle.defaults
    assert defaults.eos_token_ids == [1, 7, 9]
    assert (defaults.bos_token, defaults.eos_token, defaults.chat_template) == ("<s>", "</s>", "D")
    assert dict(defaults.special_tokens) == {"pad_token": "</s>"}
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (pytest.approx(0.6), 20, pytest.approx(0.9))
    (tmp_path / "chat_template.jinja").write_text("J")
    assert opened(tmp_path).tokenizer.defaults.chat_template == "J"
    (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"do_sample": False}))
    assert not opened(tmp_path).tokenizer.defaults.HasField("temperature")


def test_folder_with_only_a_sentencepiece_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config())
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing; tokenizer\.model alone is not read"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", b'{"do_sample": true, "temperature": "hot"}', "temperature is 'hot'"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("chat_template.jinja", b"\xff\xfe", "cannot be read"),
        ("tokenizer.json", b'{"model": 5}', "holds no vocabulary that can be read"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": "x"}}}', "holds no vocabulary that can be read"),
        ("tokenizer.json", b'{"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}', "holds no vocabulary that can"),
        ("tokenizer.json", b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_broken_files_of_a_tokenizer_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    (folder / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"{name}: .*{message}"):
        open_checkpoint(find_model(str(folder)))
