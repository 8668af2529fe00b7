"""transformers' `generate` behind a line protocol, for `bench_serving.py` to measure against.

Runs in an environment of its own, with torch and transformers and nothing of Octavo's. Reads one JSON object a line and
answers with one, then waits without using the CPU:

    {"prompts": [[ids], ...], "num_tokens": n}  ->  {"seconds": s, "num_tokens": tokens generated in all}

The first line it writes describes it: {"name": ..., "versions": {...}}. It ends when its input does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def load(path: Path, dtype: str) -> Any:
    """The model, from a GGUF file or a folder, computing in `dtype`; raises ValueError if any weight is in another."""
    import torch
    import transformers

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        source = {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            "quantization_config": transformers.GgufConfig(dequantize=True),
        }
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype)).eval()
    others = {str(weight.dtype) for weight in model.parameters() if weight.dtype != getattr(torch, dtype)}
    if others:
        raise ValueError(f"weights are in {', '.join(sorted(others))}, not {dtype}")
    return model


def generate(model: Any, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """One static batch, greedy, `num_tokens` tokens a prompt. The prompts have one length: nothing is padded."""
    import torch

    input_ids = torch.tensor(prompts)
    begin = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "num_tokens": (output.shape[1] - input_ids.shape[1]) * output.shape[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    # Libraries print as they please; only answers may go where answers are read.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    model = load(args.model.resolve(), args.dtype)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    answer({"name": "transformers", "versions": versions})
    for line in sys.stdin:
        task = json.loads(line)
        answer(generate(model, task["prompts"], task["num_tokens"]))


if __name__ == "__main__":
    main()
