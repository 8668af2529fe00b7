"""Writes the references that the end-to-end tests compare with: what transformers generates greedily in fp32.

    python tests/references/make_references.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers, gguf and accelerate (README.md names the versions); the tests need none of them. Generation
is `generate(do_sample=False)` written out: one forward pass for the prompt, then one a token over transformers' own KV
cache, with eager attention. End-of-sequence tokens do not stop it, so every reference has the same length.

It makes the tiny checkpoints too, and refuses to write one whose tokens would stay the same without the feature that it
is there for.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from prompts import PROMPTS, Prompt
from tiny_models import TINY_MODELS, VOCAB_SIZE, TinyModel, make_model, save

HERE = Path(__file__).resolve().parent
DEFAULT_MODEL_TOKENS = 64
TINY_TOKENS = 32
TINY_PROMPT_LENGTHS = (1, 13, 40, 100)
# What the tests take for a near-tie; see README.md.
MIN_MARGIN = 1e-3


@dataclass(frozen=True)
class Generation:
    """Greedy tokens, and for each: its lead over the runner-up in logits, its log-probability, the runner-up's id."""

    token_ids: list[int]
    margins: list[float]
    logprobs: list[float]
    runner_up_ids: list[int]


@torch.inference_mode()
def generate(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> Generation:
    """Greedy generation of exactly `num_tokens` tokens behind `prompt` in the model's own dtype."""
    result = Generation([], [], [], [])
    output = model(torch.tensor([prompt]), use_cache=True)
    for _ in range(num_tokens):
        logits = output.logits[0, -1].float()
        top = logits.topk(2)
        token_id = int(top.indices[0])
        result.token_ids.append(token_id)
        result.runner_up_ids.append(int(top.indices[1]))
        result.margins.append(round(float(top.values[0] - top.values[1]), 6))
        result.logprobs.append(round(float(logits.log_softmax(0)[token_id]), 6))
        output = model(torch.tensor([[token_id]]), past_key_values=output.past_key_values, use_cache=True)
    return result


def as_entry(name: str, source: dict[str, Any], prompt: list[int], generation: Generation) -> dict[str, Any]:
    return {"name": name, **source, "prompt_token_ids": prompt, **vars(generation)}


def write(path: Path, model_name: str, entries: list[dict[str, Any]]) -> None:
    """One line a value, so that a difference can be read."""
    header = {
        "model": model_name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32",
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in header.items()]
    bodies = [
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in entry.items()) + "\n}"
        for entry in entries
    ]
    text = "{\n" + ",\n".join(lines) + ',\n"references": [\n' + ",\n".join(bodies) + "\n]\n}\n"
    json.loads(text)
    path.write_text(text, encoding="utf-8")
    steps = [margin for entry in entries for margin in entry["margins"]]
    near_ties = sum(margin <= MIN_MARGIN for margin in steps)
    print(f"{path.relative_to(HERE)}: {len(entries)} prompts, {len(steps)} tokens, {near_ties} near-ties")


def load_default_model(gguf: Path) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The default model, its quantized weights read as fp32 numbers, and its tokenizer."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # The file's `tokenizer.ggml.pre` is "smollm": every digit stands alone. transformers' reader leaves that out, which
    # shows where several spaces precede a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
        attn_implementation="eager",
    ).eval()
    wrong = {name: weight.dtype for name, weight in model.named_parameters() if weight.dtype != torch.float32}
    if wrong:
        raise ValueError(f"not in fp32: {wrong}")
    return model, tokenizer


def tokenize(tokenizer: transformers.PreTrainedTokenizerBase, prompt: Prompt) -> tuple[dict[str, Any], list[int]]:
    """A prompt as an entry names it, and its token ids."""
    if not prompt.messages:
        return {"text": prompt.text}, tokenizer(prompt.text)["input_ids"]
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return {"messages": messages}, ids


def make_default_model(gguf: Path) -> None:
    """The default model's references."""
    model, tokenizer = load_default_model(gguf)
    entries = []
    for prompt in PROMPTS:
        origin, ids = tokenize(tokenizer, prompt)
        entries.append(as_entry(prompt.name, origin, ids, generate(model, ids, DEFAULT_MODEL_TOKENS)))
    write(HERE / "smollm2-135m-instruct.json", "SmolLM2-135M-Instruct.Q4_1.gguf", entries)


def make_tiny_model(tiny: TinyModel) -> None:
    """The checkpoint and its references; raises ValueError when a feature it has makes no difference to them."""
    folder = HERE / "tiny" / tiny.name
    save(tiny, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rng = random.Random(tiny.name)
    prompts = {f"random_{n}": [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in TINY_PROMPT_LENGTHS}
    entries = [as_entry(name, {}, ids, generate(model, ids, TINY_TOKENS)) for name, ids in prompts.items()]
    if tiny.without:
        plain = make_model(tiny, tiny.without).float()
        if all(generate(plain, e["prompt_token_ids"], TINY_TOKENS).token_ids == e["token_ids"] for e in entries):
            raise ValueError(f"{tiny.name} generates the same tokens without its feature")
    write(folder / "references.json", tiny.name, entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="the default model's file; without it only the tiny models are made")
    args = parser.parse_args()
    torch.set_num_threads(2)
    for tiny in TINY_MODELS:
        make_tiny_model(tiny)
    if args.gguf is not None:
        make_default_model(args.gguf.resolve())


if __name__ == "__main__":
    main()
