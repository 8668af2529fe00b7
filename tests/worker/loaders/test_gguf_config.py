from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo_worker.loaders.gguf import GGUFFile
from octavo_worker.loaders.gguf_config import config_from_gguf
from tests.worker.cases import plain_vocabulary
from tests.worker.checkpoints import gguf_metadata, gguf_tensors, tiny_config, tiny_weights, write_gguf


def read(tmp_path: Path, changes: dict[str, Any], extra: dict[str, Any] | None = None, family: str = "llama") -> Any:
    config = tiny_config(family)
    metadata = gguf_metadata(config) | plain_vocabulary(96) | changes
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tensors = gguf_tensors(config, tiny_weights(config)) | (extra or {})
    return config_from_gguf(GGUFFile(write_gguf(tmp_path / "model.gguf", metadata, tensors)))


def test_default_model(default_model: Path) -> None:
    config = config_from_gguf(GGUFFile(default_model))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.max_model_len, config.rope.theta, config.tie_word_embeddings) == (8192, 100_000.0, True)
    assert config.eos_token_ids == (2,)


def test_parts_follow_from_the_tensors(tmp_path: Path) -> None:
    assert read(tmp_path, {}, family="qwen2").qkv_bias
    assert read(tmp_path, {}, family="qwen3").qk_norm
    plain = read(tmp_path, {})
    assert (plain.qkv_bias, plain.qk_norm, plain.tie_word_embeddings) == (False, False, False)


def test_frequency_factors(tmp_path: Path) -> None:
    config = read(tmp_path, {}, {"rope_freqs.weight": np.array([1, 1, 2, 8], np.float32)})
    assert (config.rope.kind, config.rope.frequency_factors) == ("factors", (1, 1, 2, 8))


def test_yarn(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        },
    )
    assert (config.rope.kind, config.rope.factor, config.max_model_len) == ("yarn", 4.0, 256)
    assert config.rope.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.block_count": None}, "metadata llama.block_count is missing"),
        ({"llama.attention.head_count_kv": [1, 2]}, "llama.attention.head_count_kv is array"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count differs from the head dimension 8"),
        ({"llama.attention.sliding_window": [4, 8]}, "sliding_window is array"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon is 'x', which is not one number"),
        ({"llama.rope.freq_base": "x"}, "rope.freq_base is 'x'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}, "'yarn' has factor 0.0"),
        ({"tokenizer.ggml.eos_token_id": [1, 2]}, "eos_token_id is array"),
        ({"split.count": 3, "split.no": 0}, "is one of 3 parts of a split model"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, changes)
