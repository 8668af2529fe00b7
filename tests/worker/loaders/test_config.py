from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ModelLoadError
from octavo_worker.loaders.config import config_from_hf
from tests.worker.checkpoints import tiny_config


def test_shape_is_taken_over() -> None:
    config = config_from_hf(tiny_config(eos_token_id=[1, 5]), "config.json")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert config.eos_token_ids == (1, 5)
    assert config.dtype == "float32"
    assert config.kv_bytes_per_token("bfloat16") == 2 * 2 * 2 * 8 * 2
    assert config.kv_bytes_per_token("int8") == config.kv_bytes_per_token("fp8_e4m3") == 2 * 2 * 2 * (8 + 4)


@pytest.mark.parametrize(
    ("changes", "max_len"),
    [
        ({}, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}}, 256),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}}, 128),
    ],
)
def test_longest_sequence_is_the_scaled_one(changes: dict[str, Any], max_len: int) -> None:
    """The length was not derived from the factor (BR-115)."""
    assert config_from_hf(tiny_config(**changes), "config.json").max_model_len == max_len


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_either_key_of_the_kind_of_scaling_is_read(kind: str) -> None:
    """One of the keys was not read, and the model ran without scaling (BR-115)."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    configs = [
        config_from_hf(tiny_config(rope_scaling={key: kind, **scaling}), "config.json") for key in ("type", "rope_type")
    ]
    assert configs[0].rope.kind == kind
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {"sliding_window": 16}, (None, None)),
        ("mistral", {"sliding_window": 16}, (16, 16)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen2", {"sliding_window": 16}, (None, None)),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (None, 16)),
        (
            "qwen3",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (16, None),
        ),
    ],
)
def test_sliding_windows(family: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_from_hf(tiny_config(family, **changes), "config.json").sliding_windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        ({"sliding_window": "x"}, "sliding_window is 'x'; it must be a whole number"),
        ({"sliding_window": 4, "max_window_layers": "x"}, "max_window_layers is 'x'"),
        ({"sliding_window": 4, "layer_types": 5}, "layer_types is 5; it must be a list"),
    ],
)
def test_windows_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config_from_hf(tiny_config("qwen2", use_sliding_window=True, max_window_layers=0) | changes, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture 'MixtralForCausalLM' is not supported"),
        ({"architectures": None}, "architecture 'llama' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        # BR-105, BR-106, BR-108, BR-109: quantized checkpoints loaded wrongly, or failed in the middle.
        ({"quantization_config": {"quant_method": "gptq", "desc_act": True}}, "quantized by 'gptq' are not supported"),
        ({"quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}}, "by 'gptq' 'gptq_v2' are"),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "quantized by 'awq' 'gemv' are not"),
        ({"quantization_config": {"quant_method": "awq", "version": 7}}, "quantized by 'awq' 7 are not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a positive factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"head_dim": "8"}, "head_dim is '8'; it must be a whole number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; it must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "x"}}, "beta_fast is 'x'"),
        ({"eos_token_id": ["x"]}, r"eos_token_id is \['x'\]"),
        ({"quantization_config": "gptq"}, "quantized by 'gptq'"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as error:
        config_from_hf(tiny_config(**changes), "some/config.json")
    assert error.value.message.startswith("some/config.json: ")
