"""What the prefix cache gains: time to the first token behind 2,000 tokens that an earlier request had in common.

    make bench-prefix
    python benchmarks/bench_prefix.py --rounds 7

Three times a round, with a new random prefix: cold; with the prefix in the device's cache; with the prefix in the host
tier, to which other prompts have driven it. Each request has a few tokens of its own behind the prefix.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

from machine import busy_cores, installed_model, machine, write_results
from served import TOKEN_IDS, Running, Served

HERE = Path(__file__).resolve().parent
BLOCK_SIZE = 16
NUM_DEVICE_BLOCKS = 300
SWAP_SPACE_GIB = 1.0
OWN_TOKENS = 16
GOALS = {"device": 0.10, "host": 0.25}


def first_token(served: Served, prompt: list[int]) -> Running:
    """Asks for one token."""
    return served.run(served.ask(prompt, 1))


def measure_round(served: Served, rng: random.Random, num_common: int) -> dict[str, float]:
    """Times to the first token in s, by where the prefix was. Raises RuntimeError if it was somewhere else."""
    prefix = rng.choices(TOKEN_IDS, k=num_common)
    cold, device = (first_token(served, prefix + rng.choices(TOKEN_IDS, k=OWN_TOKENS)) for _ in range(2))
    for _ in range(2):
        first_token(served, rng.choices(TOKEN_IDS, k=NUM_DEVICE_BLOCKS * BLOCK_SIZE - BLOCK_SIZE))
    host = first_token(served, prefix + rng.choices(TOKEN_IDS, k=OWN_TOKENS))
    expected = num_common // BLOCK_SIZE * BLOCK_SIZE
    counts = (cold.num_cached, device.num_cached, host.num_cached)
    if counts != (0, expected, expected):
        raise RuntimeError(f"cached tokens are {counts}, not {(0, expected, expected)}")
    return {"cold": cold.first_token_s, "device": device.first_token_s, "host": host.first_token_s}


def table(rounds: list[dict[str, float]]) -> str:
    """Medians, as Markdown."""
    medians = {where: statistics.median(times[where] for times in rounds) for where in rounds[0]}
    rows = ["| prefix | time to the first token, ms | of the cold time | goal |", "|---|---:|---:|---:|"]
    for where, seconds in medians.items():
        goal = f"{GOALS[where]:.0%}" if where in GOALS else ""
        rows.append(f"| {where} | {1000 * seconds:.1f} | {seconds / medians['cold']:.1%} | {goal} |")
    return "\n".join(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file or a folder; unset: the default model")
    parser.add_argument("--dtype", default="bfloat16", help="data type")
    parser.add_argument("--threads", type=int, default=2, help="compute threads")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, behind one that is not counted")
    parser.add_argument("--common", type=int, default=2000, help="tokens in common")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be at least 1")
    return args


def main() -> int:
    args = arguments()
    settings = {
        "model": str(args.model or installed_model()),
        "dtype": args.dtype,
        "quantization": "none",
        "num_threads": args.threads,
        "block_size": BLOCK_SIZE,
        "num_device_blocks": NUM_DEVICE_BLOCKS,
        "swap_space": SWAP_SPACE_GIB,
    }
    rng = random.Random(args.common)
    rounds: list[dict[str, float]] = []
    with Served(settings) as served:
        others = busy_cores()
        for number in range(args.rounds + 1):
            times = measure_round(served, rng, args.common)
            label = f"round {number} of {args.rounds}" if number else "warm-up"
            shown = ", ".join(f"{where} {1000 * seconds:.1f} ms" for where, seconds in times.items())
            print(f"  {label:<14} {shown}", flush=True)
            if number:
                rounds.append(times)
    where = machine()
    path = write_results(args.results, "prefix", others, settings=settings, common=args.common, rounds=rounds)
    print(f"\n{table(rounds)}\n")
    print(f"{where['cpu']}, {where['cores']} cores; {args.dtype}, {args.threads} threads; medians of {args.rounds}.")
    print(f"Every round: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
