"""Writes the log-probabilities that transformers gives the tokens of the default model's prompts, in fp32.

    python tests/references/make_prompt_references.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Needs what make_references.py needs, and reads the prompts' token ids from its output. One forward pass a prompt: the
logits at position p - 1, through log_softmax, score the token at p.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from make_references import HERE, load_default_model

SOURCE = HERE / "smollm2-135m-instruct.json"
TARGET = HERE / "prompt_logprobs" / "smollm2-135m-instruct.json"


@torch.inference_mode()
def score(model: transformers.PreTrainedModel, prompt: list[int]) -> dict[str, list[float] | list[int]]:
    """Of each token from the second on: its log-probability, the likeliest token there, and that one's."""
    rows = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    likeliest = rows.max(-1)
    own = rows.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    return {
        "logprobs": [round(value, 5) for value in own.tolist()],
        "likeliest_ids": likeliest.indices.tolist(),
        "likeliest_logprobs": [round(value, 5) for value in likeliest.values.tolist()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True, help="the default model's file")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model, _ = load_default_model(args.gguf.resolve())
    prompts = json.loads(SOURCE.read_text(encoding="utf-8"))["references"]
    entries = [{"name": prompt["name"], **score(model, prompt["prompt_token_ids"])} for prompt in prompts]
    header = {"model": args.gguf.name, "torch": torch.__version__, "transformers": transformers.__version__}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in header.items()]
    bodies = [
        "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()) + "\n}"
        for entry in entries
    ]
    TARGET.parent.mkdir(exist_ok=True)
    text = "{\n" + ",\n".join(lines) + ',\n"prompts": [\n' + ",\n".join(bodies) + "\n]\n}\n"
    TARGET.write_text(text, encoding="utf-8")
    num_tokens = sum(len(entry["logprobs"]) for entry in entries)
    print(f"{TARGET.relative_to(HERE)}: {len(entries)} prompts, {num_tokens} tokens")


if __name__ == "__main__":
    main()
