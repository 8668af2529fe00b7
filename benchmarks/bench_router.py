"""What the router alone can do: one core, hundreds of streams, and a worker that answers at once.

    make bench-router
    python benchmarks/bench_router.py --only grpc --streams 64

The router has a core to itself; the fake worker and the clients share the others. Three measurements: tokens a second
over gRPC and over HTTP, each from when all streams have begun to when the first has ended, with the tokens a message
brings and the delay from the worker's answer to the client; and, at a steady pace, the time from the worker's answer to
the plan that follows it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fake_worker import FakeWorker
from machine import busy_cores, machine, write_results
from stream_clients import GrpcClients, HttpClients

HERE = Path(__file__).resolve().parent
GOALS = {"grpc": 20_000, "http": 10_000}
TURNAROUND_GOAL_MS = 1.0
PROMPT_TOKENS = 8
MAX_STEP_TOKENS = 8192
START_TIMEOUT_S = 30.0


class Router:
    """The router's process on a core of its own; an asynchronous context manager that ends it."""

    def __init__(self, worker_address: str, folder: Path, *, num_streams: int, core: int | None) -> None:
        self._ready_file = folder / "ready.json"
        self._core = core
        self._flags = {
            "worker": worker_address,
            "port": 0,
            "grpc-port": 0,
            "ready-file": self._ready_file,
            "max-num-seqs": num_streams,
            "max-num-batched-tokens": MAX_STEP_TOKENS,
            "log-level": "warning",
        }
        self.addresses: dict[str, str] = {}

    async def __aenter__(self) -> Router:
        flags = [f"--{name}={value}" for name, value in self._flags.items()]
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-m", "octavo_router", *flags)
        if self._core is not None:
            os.sched_setaffinity(self._process.pid, {self._core})
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._ready_file.exists():
                if self._process.returncode is not None:
                    raise SystemExit("the router did not start")
                await asyncio.sleep(0.05)
        ready = json.loads(self._ready_file.read_text())
        self.addresses = {"grpc": ready["grpc"], "http": ready["http"]}
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        await self._process.wait()

    def turnaround_buckets(self) -> dict[float, float]:
        """The router's own histogram: how many plans were on their way within so many seconds of a result."""
        with urllib.request.urlopen(f"{self.addresses['http']}/metrics") as response:
            text = response.read().decode()
        pattern = r'^octavo_plan_turnaround_seconds_bucket\{le="([^"]+)"\} (\S+)$'
        return {float(bound): float(count) for bound, count in re.findall(pattern, text, re.MULTILINE)}

    @property
    def cpu_s(self) -> float:
        """CPU time that it has used; 0 where the system does not tell."""
        path = Path(f"/proc/{self._process.pid}/stat")
        if not path.exists():
            return 0.0
        fields = path.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Streams:
    """What one run over all streams gave. delay: from the worker's answer with a token to its client."""

    tokens_per_s: float
    tokens_per_message: float
    delay_p50_ms: float
    delay_p99_ms: float
    steps_per_s: float
    router_cores: float
    clients_cores: float


@dataclass(frozen=True)
class Turnaround:
    """Medians in ms: within the router, from a result to the next plan on its way; and seen from the worker, with the
    transport both ways."""

    router_ms: float
    worker_ms: float


async def run_streams(
    worker: FakeWorker, router: Router, kind: str, *, num_streams: int, num_tokens: int, step_s: float = 0.0
) -> Streams:
    """Runs that many streams of as many tokens each. Raises RuntimeError if one of them is shorter."""
    kinds = {"grpc": GrpcClients, "http": HttpClients}
    ids = worker.prompt_ids
    tail = random.choices(ids, k=PROMPT_TOKENS - 2)
    prompts = [[ids[number // len(ids)], ids[number % len(ids)], *tail] for number in range(num_streams)]
    worker.begin(num_streams, step_s=step_s)
    async with kinds[kind](router.addresses[kind], num_streams) as clients:
        began_at, router_cpu_s, own_cpu_s = time.perf_counter(), router.cpu_s, time.process_time()
        streams = await asyncio.gather(*(clients.follow(prompt, num_tokens) for prompt in prompts))
        seconds = time.perf_counter() - began_at
    cores = ((router.cpu_s - router_cpu_s) / seconds, (time.process_time() - own_cpu_s) / seconds)
    given = [worker.given_at[tuple(prompt[: worker.KEY_LENGTH])] for prompt in prompts]
    counts = {len(times) for times in given} | {sum(count for _, count in stream) for stream in streams}
    if counts != {num_tokens}:
        raise RuntimeError(f"streams ({kind}) have {sorted(counts)} tokens, not {num_tokens}")
    begin = max(stream[0][0] for stream in streams)
    end = min(stream[-1][0] for stream in streams)
    messages = [(at, count) for stream in streams for at, count in stream if begin < at <= end and count]
    delays = sorted(
        at - given_at
        for stream, times in zip(streams, given, strict=True)
        for at, given_at in zip((at for at, count in stream for _ in range(count)), times, strict=True)
        if begin < at <= end
    )
    if end <= begin or not delays:
        raise RuntimeError(f"no time at which all streams ran; give more than {num_tokens} --tokens")
    num_received = sum(count for _, count in messages)
    return Streams(
        tokens_per_s=num_received / (end - begin),
        tokens_per_message=num_received / len(messages),
        delay_p50_ms=1000 * delays[len(delays) // 2],
        delay_p99_ms=1000 * delays[len(delays) * 99 // 100],
        steps_per_s=sum(begin < at <= end for at in given[0]) / (end - begin),
        router_cores=cores[0],
        clients_cores=cores[1],
    )


async def run_turnaround(
    worker: FakeWorker, router: Router, *, batch: int, num_tokens: int, step_s: float
) -> Turnaround:
    """What came of `batch` streams and steps of step_s."""
    before = router.turnaround_buckets()
    await run_streams(worker, router, "grpc", num_streams=batch, num_tokens=num_tokens, step_s=step_s)
    after = router.turnaround_buckets()
    seen = [waited.seconds for waited in worker.waits if waited.num_sequences == batch]
    counts = [(bound, count - before.get(bound, 0.0)) for bound, count in after.items()]
    return Turnaround(router_ms=1000 * _median_of(counts), worker_ms=1000 * statistics.median(seen))


def _median_of(counts: Sequence[tuple[float, float]]) -> float:
    """The median of a histogram of (upper bound, cumulative count), interpolated within its bucket."""
    half = counts[-1][1] / 2
    low, below = 0.0, 0.0
    for high, count in counts:
        if count >= half:
            return low + (high - low) * (half - below) / (count - below)
        low, below = high, count
    raise AssertionError("the last count is the largest")


async def measure(args: argparse.Namespace, core: int | None) -> dict[str, Any]:
    """All that is asked for: by name, a run each round."""
    results: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as name:
        folder = Path(name)
        worker = FakeWorker(f"unix:{folder}/worker.sock")
        await worker.start()
        async with Router(f"unix:{folder}/worker.sock", folder, num_streams=args.streams, core=core) as router:
            for number in range(args.rounds + 1):
                label = f"round {number} of {args.rounds}" if number else "warm-up"
                for kind in ("grpc", "http"):
                    if args.only in ("", kind):
                        streams = await run_streams(
                            worker, router, kind, num_streams=args.streams, num_tokens=args.tokens
                        )
                        print(f"  {label:<14} {kind}: {streams}", flush=True)
                        results.setdefault(kind, []).extend([asdict(streams)] if number else [])
                if args.only in ("", "turnaround"):
                    turnaround = await run_turnaround(
                        worker, router, batch=args.batch, num_tokens=args.steps, step_s=args.step_ms / 1000
                    )
                    print(f"  {label:<14} {turnaround}", flush=True)
                    results.setdefault("turnaround", []).extend([asdict(turnaround)] if number else [])
        await worker.stop()
    return results


def table(results: dict[str, Any], args: argparse.Namespace) -> str:
    """Medians, as Markdown."""
    rows = [
        "| | tokens/s | goal | tokens a message | delay, median, ms | delay, 99th percentile, ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, goal in GOALS.items():
        if kind in results:
            median = {name: statistics.median(run[name] for run in results[kind]) for name in results[kind][0]}
            shown = [
                f"{args.streams} streams, {kind}",
                f"{median['tokens_per_s']:,.0f}",
                f"{goal:,}",
                *(f"{median[name]:.1f}" for name in ("tokens_per_message", "delay_p50_ms", "delay_p99_ms")),
            ]
            rows.append(f"| {' | '.join(shown)} |")
    if "turnaround" in results:
        router_ms, worker_ms = (
            statistics.median(run[name] for run in results["turnaround"]) for name in ("router_ms", "worker_ms")
        )
        rows += [
            "",
            f"From a result received to the next plan sent, at batch {args.batch}: {router_ms:.2f} ms "
            f"(goal {TURNAROUND_GOAL_MS:g} ms); as the worker sees it, transport included: {worker_ms:.2f} ms.",
        ]
    return "\n".join(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=512, help="streams at once")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a stream")
    parser.add_argument("--batch", type=int, default=64, help="streams while plans are timed")
    parser.add_argument("--steps", type=int, default=200, help="tokens of each of these")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step meanwhile")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, behind one that is not counted")
    parser.add_argument("--only", choices=("", "grpc", "http", "turnaround"), default="", help="one measurement alone")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be at least 1")
    return args


def split_cores() -> int | None:
    """Keeps this process off one core, which is the router's. None where there is only one, or no way to say so."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        print("WARNING: the router shares its core with the clients; the figures say too little", flush=True)
        return None
    os.sched_setaffinity(0, cores[1:])
    return cores[0]


def main() -> int:
    args = arguments()
    others = busy_cores()
    results = asyncio.run(measure(args, split_cores()))
    where = machine()
    settings = {name: value for name, value in vars(args).items() if name != "results"}
    path = write_results(args.results, "router", others, settings=settings, rounds=results)
    print(f"\n{table(results, args)}\n")
    print(f"{where['cpu']}, one core for the router; medians of {args.rounds}.\nEvery round: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
