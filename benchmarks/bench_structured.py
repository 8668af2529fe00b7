"""What structured output costs: throughput of a batch whose answers match a JSON schema, against one without.

    make bench-structured
    python benchmarks/bench_structured.py --rounds 7

Both go to one server and take turns: with the schema, without it. The schema has no end before the last token that is
asked for, so that both sides generate as many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path

from machine import busy_cores, installed_model, machine, write_results
from served import TOKEN_IDS, Running, Served, greedy_request

from octavo.v1 import inference_pb2

HERE = Path(__file__).resolve().parent
GOAL = 0.85
SIDES = ("schema", "free")
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 99_999},
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "place", "thing", "idea"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
            "where": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 24}, "is_known": {"type": "boolean"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
        "required": ["id", "name", "kind", "tags"],
        "additionalProperties": False,
    },
}


def request_of(prompt: list[int], num_tokens: int, side: str) -> inference_pb2.GenerateRequest:
    """A request that generates so many tokens, with or without the schema."""
    request = greedy_request(prompt, num_tokens)
    if side == "schema":
        request.stop.ignore_eos = False
        request.sampling.grammar.json_schema = json.dumps(SCHEMA)
    return request


def measure(served: Served, prompts: list[list[int]], num_tokens: int, side: str) -> float:
    """Tokens a second of a batch. Raises RuntimeError if an answer is shorter than it was to be."""

    async def all_of_them() -> list[Running]:
        calls = [served.follow(request_of(p, num_tokens, side), Running(len(p), num_tokens)) for p in prompts]
        return await asyncio.gather(*calls)

    began = time.perf_counter()
    answers = served.run(all_of_them())
    seconds = time.perf_counter() - began
    counts = {running.num_received for running in answers}
    if counts != {num_tokens}:
        raise RuntimeError(f"answers ({side}) have {sorted(counts)} tokens, not {num_tokens}")
    return len(prompts) * num_tokens / seconds


def table(rounds: list[dict[str, float]]) -> str:
    """Medians and their ratio, as Markdown."""
    medians = {side: statistics.median(rates[side] for rates in rounds) for side in SIDES}
    ratios = [rates["schema"] / rates["free"] for rates in rounds]
    rows = ["| answers | output tokens/s | of the free rate | worst round | goal |", "|---|---:|---:|---:|---:|"]
    rows.append(f"| free | {medians['free']:.1f} | | | |")
    ratio = medians["schema"] / medians["free"]
    rows.append(f"| with a JSON schema | {medians['schema']:.1f} | {ratio:.2f} | {min(ratios):.2f} | {GOAL} |")
    return "\n".join(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file or a folder; unset: the default model")
    parser.add_argument("--dtype", default="bfloat16", help="data type")
    parser.add_argument("--threads", type=int, default=2, help="compute threads")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, behind one that is not counted")
    parser.add_argument("--batch", type=int, default=16, help="requests at once")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="length of a prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be at least 1")
    return args


def main() -> int:
    args = arguments()
    settings = {"model": str(args.model or installed_model()), "dtype": args.dtype}
    settings |= {"quantization": "none", "num_threads": args.threads}
    rng = random.Random(args.batch)
    rounds: list[dict[str, float]] = []
    with Served(settings) as served:
        others = busy_cores()
        for number in range(args.rounds + 1):
            rates = {}
            for side in SIDES:
                # New random prompts, so that no cache of prefixes helps either side.
                prompts = [rng.choices(TOKEN_IDS, k=args.prompt_tokens) for _ in range(args.batch)]
                rates[side] = measure(served, prompts, args.output_tokens, side)
            label = f"round {number} of {args.rounds}" if number else "warm-up"
            print(f"  {label:<14} " + ", ".join(f"{s} {rate:.1f} tokens/s" for s, rate in rates.items()), flush=True)
            if number:
                rounds.append(rates)
    where = machine()
    path = write_results(args.results, "structured", others, settings=settings, batch=args.batch, rounds=rounds)
    print(f"\n{table(rounds)}\n")
    print(f"{where['cpu']}, {where['cores']} cores; {args.dtype}, {args.threads} threads; medians of {args.rounds}.")
    print(f"Every round: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
