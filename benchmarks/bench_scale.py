"""How the time of a plan and of a token grows: with those that wait, with the context, with those that run.

    make bench-scale
    python benchmarks/bench_scale.py --only plans

Three measurements. The pure scheduler's time for a plan with 10, 1,000 and 100,000 waiting requests, each in a process
of its own. On a served model, the time of a token behind contexts of up to 8,000 tokens, and with 1 to 256 sequences at
once; both beside the floor that this machine's memory and arithmetic set, as a table and as a plot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from curves import Curve, write_curves
from floor import Floor, measure_rates
from machine import busy_cores, installed_model, machine
from served import TOKEN_IDS, Served, greedy_request

from octavo_worker.loaders.checkpoint import read_config
from octavo_worker.loaders.config import DTYPE_BYTES
from octavo_worker.loaders.source import find_model

HERE = Path(__file__).resolve().parent
WAITING = (10, 1_000, 100_000)
CONTEXTS = (32, 512, 1024, 2048, 4096, 8000)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_PROMPT = 16
STEP_TOKENS = 2048  # so that a large batch is together before its first members have ended
KV_TOKENS = 32 << 10
BLOCK_SIZE = 16
PLANS_GOAL = 0.20

Points = list[tuple[int, float]]


def measure_plans(waiting: int, num_plans: int) -> dict[str, float]:
    """Microseconds for a plan with so many waiting requests."""
    command = [sys.executable, str(HERE / "plan_times.py"), "--waiting", str(waiting), "--plans", str(num_plans)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    times = sorted(json.loads(output))
    return {"median": statistics.median(times), "p99": times[len(times) * 99 // 100], "max": times[-1]}


def scale_plans(rounds: int, num_plans: int) -> dict[int, dict[str, float]]:
    """Medians of a few rounds, in each of which all take their turns."""
    runs: dict[int, list[dict[str, float]]] = {waiting: [] for waiting in WAITING}
    for number in range(1, rounds + 1):
        for waiting, results in runs.items():
            results.append(measure_plans(waiting, num_plans))
            shown = ", ".join(f"{name} {value:.0f} us" for name, value in results[-1].items())
            print(f"  plans, round {number} of {rounds}: {waiting:>7,} waiting: {shown}", flush=True)
    return {
        waiting: {name: statistics.median(run[name] for run in results) for name in results[0]}
        for waiting, results in runs.items()
    }


def token_s(served: Served, prompt_tokens: int, batch: int, num_tokens: int, rng: random.Random) -> float:
    """Seconds from a token to the next, while so many sequences run. Raises RuntimeError for too few tokens."""

    async def arrivals(prompt: Sequence[int]) -> list[tuple[float, int]]:
        request = greedy_request(prompt, num_tokens)
        return [
            (time.perf_counter(), sum(len(delta.token_ids) for delta in response.deltas))
            async for response in served.inference.Generate(request)
        ]

    async def all_of_them() -> list[list[tuple[float, int]]]:
        prompts = [rng.choices(TOKEN_IDS, k=prompt_tokens) for _ in range(batch)]
        return await asyncio.gather(*(arrivals(prompt) for prompt in prompts))

    streams = [[(at, count) for at, count in stream if count] for stream in served.run(all_of_them())]
    begin, end = max(stream[0][0] for stream in streams), min(stream[-1][0] for stream in streams)
    num_received = sum(count for stream in streams for at, count in stream if begin < at <= end)
    if end <= begin:
        raise RuntimeError(f"no time at which {batch} sequences ran; give more than {num_tokens} --tokens")
    return (end - begin) * batch / num_received


def scale(name: str, values: Sequence[int], rounds: int, measure: Callable[[int], float]) -> Points:
    """Medians of a few rounds over all values, behind one that is not counted."""
    runs: dict[int, list[float]] = {value: [] for value in values}
    for number in range(rounds + 1):
        for value, times in runs.items():
            seconds = measure(value)
            label = f"round {number} of {rounds}" if number else "warm-up"
            print(f"  {name}, {label}: {value:>5,}: {1000 * seconds:.2f} ms", flush=True)
            if number:
                times.append(1000 * seconds)
    return [(value, statistics.median(times)) for value, times in runs.items()]


def plans_table(plans: dict[int, dict[str, float]]) -> str:
    """Markdown, with each time as a ratio to the fastest of its column."""
    least = {name: min(times[name] for times in plans.values()) for name in ("median", "p99")}
    rows = [
        "| waiting requests | a plan, median, us | 99th percentile, us | of the least | goal |",
        "|---:|---:|---:|---:|---:|",
    ]
    for waiting, times in plans.items():
        ratios = ", ".join(f"{times[name] / least[name]:.2f}" for name in least)
        rows.append(f"| {waiting:,} | {times['median']:.0f} | {times['p99']:.0f} | {ratios} | {1 + PLANS_GOAL:g} |")
    return "\n".join(rows)


def tokens_table(name: str, points: Points, floor: Points) -> str:
    """Markdown."""
    rows = [f"| {name} | ms a step | floor, ms | ratio |", "|---:|---:|---:|---:|"]
    for (value, measured), (_, least) in zip(points, floor, strict=True):
        rows.append(f"| {value:,} | {measured:.2f} | {least:.2f} | {measured / least:.2f} |")
    return "\n".join(rows)


def scale_tokens(args: argparse.Namespace, model: str) -> tuple[dict[str, Points], dict[str, Points], dict[str, Any]]:
    """Milliseconds a step by context and by batch, as measured and at least; and what the floor was made of."""
    settings = {
        "model": model,
        "dtype": args.dtype,
        "num_threads": args.threads,
        "block_size": BLOCK_SIZE,
        "num_device_blocks": KV_TOKENS // BLOCK_SIZE,
        "max_num_batched_tokens": STEP_TOKENS,
        "quantization": args.quantization,
    }
    is_int8 = args.quantization == "int8"
    rates = measure_rates(args.dtype, args.threads, is_int8=is_int8)
    print(f"  this machine, {args.threads} threads: {rates.shown()}", flush=True)
    weight_bytes = 1 if is_int8 else DTYPE_BYTES[args.dtype]
    floor = Floor(read_config(find_model(model)), args.dtype, weight_bytes, rates)
    rng = random.Random(args.tokens)
    measured: dict[str, Points] = {}
    with Served(settings) as served:
        if args.only in ("", "contexts"):
            measured["contexts"] = scale(
                "context", CONTEXTS, args.rounds, lambda length: token_s(served, length, 1, args.tokens, rng)
            )
        if args.only in ("", "batches"):
            measured["batches"] = scale(
                "sequences", BATCHES, args.rounds, lambda batch: token_s(served, SHORT_PROMPT, batch, args.tokens, rng)
            )
    behind = args.tokens // 2
    least = {
        "contexts": [(length, 1000 * floor.step_s(1, length + behind)) for length in CONTEXTS],
        "batches": [(batch, 1000 * floor.step_s(batch, SHORT_PROMPT + behind)) for batch in BATCHES],
    }
    return measured, least, {"settings": settings, "weight_bytes": weight_bytes, "rates": rates.as_json()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--only", choices=("", "plans", "contexts", "batches"), default="", help="one measurement alone"
    )
    parser.add_argument("--model", default="", help="a GGUF file or a folder; unset: the default model")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPE_BYTES), help="data type")
    parser.add_argument(
        "--quantization", default="none", choices=("none", "int8"), help="what linear layers compute in"
    )
    parser.add_argument("--threads", type=int, default=2, help="compute threads")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate for each sequence")
    parser.add_argument("--plans", type=int, default=8000, help="plans to time")
    parser.add_argument("--rounds", type=int, default=1, help="measured rounds; of plans, two more")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file and the plots")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be at least 1")
    return args


def main() -> int:
    args = arguments()
    others = busy_cores()
    facts: dict[str, Any] = {"machine": machine(), "busy_cores": round(others, 2)}
    tables: list[str] = []
    if args.only in ("", "plans"):
        facts["plans_us"] = scale_plans(args.rounds + 2, args.plans)
        tables.append(plans_table(facts["plans_us"]))
    now = datetime.now(UTC)
    path = args.results / f"scale-{now:%Y%m%d-%H%M%S}.json"
    if args.only != "plans":
        measured, least, how = scale_tokens(args, args.model or str(installed_model()))
        facts |= {"how": how, "ms": measured, "floor_ms": least}
        names = {"contexts": "tokens before it", "batches": "sequences at once"}
        for kind, points in measured.items():
            tables.append(tokens_table(names[kind], points, least[kind]))
            write_curves(
                path.with_name(f"{path.stem}-{kind}.svg"),
                title=f"A decode step by {names[kind]}",
                x_name=names[kind],
                y_name="ms",
                curves=[Curve("octavo, served", points), Curve("floor", least[kind])],
            )
    args.results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"time": now.isoformat(), **facts}, indent=2) + "\n")
    print("\n" + "\n\n".join(tables) + "\n")
    print(f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores. Figures, plots: {path.with_suffix('')}*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
