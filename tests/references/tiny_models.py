"""Tiny random checkpoints, one for each thing a decoder of the llama family must get right, and their tokenizer.

A checkpoint's random numbers come from a generator seeded by the model's place in `TINY_MODELS`, so the same versions
of torch and transformers write the same files again. Norm weights and biases are random too: a loader that drops one is
found out. Weights are large, so that the two likeliest tokens lie far apart. Only `make_references.py` reads this.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

VOCAB_SIZE = 384
EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXT = (
    "the cat sat on the mat and the dog sat on the log",
    "one two three four five six seven eight nine ten",
    "def main(): return [x for x in range(10)]",
    "The quick brown fox jumps over the lazy dog while seventeen grey geese fly south for the winter",
    "import random; values = sorted(random.sample(range(100), k=20), reverse=True)",
    "der Hund und die Katze, le chien et le chat, el perro y el gato",
)


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint to make.

    config: what differs from `BASE`. without: the settings whose removal must change the tokens, which
    `make_references.py` checks: a reference that passes without the feature proves nothing. dtype: of the stored
    weights. shard_size: largest shard, to split the checkpoint. old_spelling: config.json is written as transformers 4
    did, which most checkpoints in the world are.
    """

    name: str
    config_class: type[transformers.PreTrainedConfig]
    config: dict[str, Any]
    without: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    shard_size: str = "5GB"
    old_spelling: bool = False


BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


NO_SCALING = _rope(rope_type="default")

TINY_MODELS: tuple[TinyModel, ...] = (
    TinyModel(
        "llama-linear-bias",
        transformers.LlamaConfig,
        {**_rope(rope_type="linear", factor=2.0), "attention_bias": True, "mlp_bias": True},
        without=NO_SCALING,
        dtype=torch.float16,
        old_spelling=True,
    ),
    TinyModel(
        "llama-llama3-tied",
        transformers.LlamaConfig,
        {
            **_rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
        without=NO_SCALING,
        shard_size="150KB",
        old_spelling=True,
    ),
    TinyModel(
        "mistral-window",
        transformers.MistralConfig,
        {"sliding_window": 16, "head_dim": 20},
        without={"sliding_window": None},
    ),
    TinyModel(
        "qwen2-window-tied",
        transformers.Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
        without={"use_sliding_window": False, "layer_types": None},
        old_spelling=True,
    ),
    TinyModel(
        "qwen2-yarn",
        transformers.Qwen2Config,
        {
            **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
            "max_position_embeddings": 256,
        },
        without=NO_SCALING,
    ),
    TinyModel(
        "qwen3-tied",
        transformers.Qwen3Config,
        {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    # Dynamic scaling changes nothing up to max_position_embeddings, and no reference goes beyond: there, transformers
    # rotates each key by what the length was when it was computed, so its tokens depend on how the prompt was cut.
    TinyModel("qwen3-dynamic", transformers.Qwen3Config, {**_rope(rope_type="dynamic", factor=2.0), "head_dim": 16}),
)


def make_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE entries: special tokens, all bytes, merges of `TRAINING_TEXT`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}: lengthen TRAINING_TEXT"
        )
    return tokenizer


def make_model(tiny: TinyModel, overrides: dict[str, Any] | None = None) -> transformers.PreTrainedModel:
    """The random model in the dtype it is stored in. `overrides` change its configuration, not its weights."""
    config = tiny.config_class(**{**BASE, **tiny.config, **(overrides or {})})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1000 + TINY_MODELS.index(tiny))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * config.initializer_range
            weight.copy_(1.0 + noise if name.endswith("norm.weight") else noise)
    return model.to(tiny.dtype).eval()


def _spell_as_before(path: Path) -> None:
    """Rewrites a config.json in place: rope_theta and rope_scaling, torch_dtype, and no layer_types."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save(tiny: TinyModel, folder: Path) -> None:
    """Writes the checkpoint and its tokenizer as Hugging Face lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(tiny).save_pretrained(folder, max_shard_size=tiny.shard_size)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)
    if tiny.old_spelling:
        _spell_as_before(folder / "config.json")
    make_tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": EOS_TOKEN,
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
