"""What paging the KV memory gains: Octavo against slots of the maximum length with static batches, in one run.

    make bench-paging
    python benchmarks/bench_paging.py --scale 0.5 --requests 96

All sides are the same server, the same kernels and the same KV memory: four sequences of the maximum length. With
slots, that memory holds four requests, since each reserves the maximum length in one piece; they run as a static batch,
and the next four come when the longest of them has ended. Once with prompts padded to the longest of the batch, as the
rectangular tensors of such servers need it, and once without. The last side is Octavo as it is. README.md in this
folder describes what is asked and what each number means.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from bars import Chart, write_bars
from machine import busy_cores, installed_model, machine, write_results
from served import TOKEN_IDS, Running, Served, greedy_request

from octavo.v1 import admin_pb2, sampling_pb2

HERE = Path(__file__).resolve().parent
TRACE = HERE / "data" / "azure_conv_2023.csv"
NUM_SLOTS = 4
MAX_MODEL_LEN = 8192
BLOCK_SIZE = 16
METER_INTERVAL_S = 0.05
# The second scenario: short requests, and a long one that arrives among them.
MAX_SHORT_CONTEXT = 512
LONG_CONTEXT, LONG_GENERATED = 5000, 64


@dataclass(frozen=True)
class Lengths:
    """A request of the trace: tokens of its prompt, and tokens that are generated behind it."""

    context: int
    generated: int


def load_trace(scale: float) -> list[Lengths]:
    """The lengths in order of arrival, scaled, and clipped to the maximum length."""
    with TRACE.open(encoding="utf-8") as file:
        rows = [(int(row["context_tokens"]), int(row["generated_tokens"])) for row in csv.DictReader(file)]
    trace = []
    for context, generated in rows:
        generated = max(1, round(generated * scale))
        trace.append(Lengths(min(max(1, round(context * scale)), MAX_MODEL_LEN - generated), generated))
    return trace


# The sides


class Front(Protocol):
    """How requests come to the server."""

    name: str

    async def ask(self, prompt: list[int], num_tokens: int) -> Running:
        """Sends a request and waits until its tokens have come."""

    def account(self, pool: admin_pb2.PoolState) -> tuple[float, float]:
        """Tokens of KV memory that are in use, and how many of them hold tokens of unfinished requests."""


class Paged:
    """Octavo: every request as it arrives."""

    name = "octavo"

    def __init__(self, served: Served) -> None:
        self._served = served

    async def ask(self, prompt: list[int], num_tokens: int) -> Running:
        return await self._served.ask(prompt, num_tokens)

    def account(self, pool: admin_pb2.PoolState) -> tuple[float, float]:
        return pool.used_block_count * pool.block_size, pool.held_token_count


@dataclass(frozen=True)
class _Waiting:
    """A request that waits for its batch, or is in it."""

    prompt: list[int]
    running: Running
    over: asyncio.Future[None]


class Slots:
    """Slots of the maximum length and static batches: the first waiting requests run together until the longest of
    them ends; then come the next. As in any static batch every slot computes to the end, needed or not.

    pads: prompts are padded to the longest of the batch. Generous in all else: a request's latency ends with its own
    last token, and a batch begins as soon as anybody waits.
    """

    def __init__(self, served: Served, *, pads: bool) -> None:
        self.name = "slots, padded" if pads else "slots"
        self._served = served
        self._pads = pads
        self._waiting: deque[_Waiting] = deque()
        self._batch: list[Running] = []
        self._num_computed_prompt_tokens = 0
        self._runner: asyncio.Task[None] | None = None

    async def ask(self, prompt: list[int], num_tokens: int) -> Running:
        waiting = _Waiting(prompt, Running(len(prompt), num_tokens), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run_batches())
        await waiting.over
        return waiting.running

    async def _run_batches(self) -> None:
        # Those that arrive at one moment belong to one batch.
        await asyncio.sleep(0)
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(NUM_SLOTS, len(self._waiting)))]
            await self._run_batch(batch)
            for waiting in batch:
                waiting.over.set_result(None)
            # Whoever waited for an answer to send the next request does so now.
            await asyncio.sleep(0.002)

    async def _run_batch(self, batch: Sequence[_Waiting]) -> None:
        prompts = [waiting.prompt for waiting in batch]
        if self._pads:
            longest = max(map(len, prompts))
            prompts = [random.choices(TOKEN_IDS, k=longest - len(prompt)) + prompt for prompt in prompts]
        self._batch = [waiting.running for waiting in batch]
        self._num_computed_prompt_tokens = sum(map(len, prompts))
        num_tokens = max(running.wanted for running in self._batch)
        calls = (
            self._served.follow(greedy_request(prompt, num_tokens), running)
            for prompt, running in zip(prompts, self._batch, strict=True)
        )
        await asyncio.gather(*calls)
        self._batch = []

    def account(self, pool: admin_pb2.PoolState) -> tuple[float, float]:
        if not self._batch:
            return 0, 0
        prompt_tokens = sum(running.prompt_tokens for running in self._batch)
        over = sum(running.prompt_tokens + running.num_received for running in self._batch if running.ended_at)
        computed = min(pool.held_token_count, self._num_computed_prompt_tokens)
        live = computed * prompt_tokens / self._num_computed_prompt_tokens + pool.held_token_count - computed - over
        return NUM_SLOTS * MAX_MODEL_LEN, max(0, live)


# What is measured


class Meter:
    """Reads the pool again and again while a `with` block runs."""

    def __init__(self, served: Served, front: Front) -> None:
        self._served, self._front = served, front
        self.in_use: list[float] = []
        self.live: list[float] = []

    async def __aenter__(self) -> Meter:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        await _cancelled(self._task)

    async def _read(self) -> None:
        while True:
            in_use, live = self._front.account(await self._served.device_pool())
            self.in_use.append(in_use)
            self.live.append(live)
            await asyncio.sleep(METER_INTERVAL_S)

    @property
    def live_share(self) -> float:
        """Of the memory in use, the share that holds tokens of unfinished requests, over the whole time."""
        return sum(self.live) / max(1.0, sum(self.in_use))


@dataclass(frozen=True)
class TraceResult:
    """The trace at full load: everything waits from the start."""

    seconds: float
    tokens_per_s: float
    live_share: float
    mean_live_tokens: float


@dataclass(frozen=True)
class LongResult:
    """A long request among short ones: its latency and its time to the first token; medians of the short ones'."""

    latency_s: float
    first_token_s: float
    short_latency_s: float


async def run_trace(served: Served, front: Front, trace: Sequence[Lengths]) -> TraceResult:
    """All requests in order of arrival, as fast as the side takes them."""
    prompts = random_prompts("trace", [lengths.context for lengths in trace])
    begin = time.perf_counter()
    async with Meter(served, front) as meter:
        asked = [front.ask(prompt, lengths.generated) for prompt, lengths in zip(prompts, trace, strict=True)]
        await asyncio.gather(*asked)
    seconds = time.perf_counter() - begin
    num_tokens = sum(lengths.generated for lengths in trace)
    mean_live = sum(meter.live) / max(1, len(meter.live))
    return TraceResult(seconds, num_tokens / seconds, meter.live_share, mean_live)


async def run_long(front: Front, trace: Sequence[Lengths], num_clients: int) -> LongResult:
    """Clients send one short request behind the other; when half of them are answered, the long one arrives."""
    pending = deque(zip(random_prompts("short", [lengths.context for lengths in trace]), trace, strict=True))
    due = len(trace) // 2
    latencies: list[float] = []
    half = asyncio.Event()

    async def client() -> None:
        while pending:
            prompt, lengths = pending.popleft()
            latencies.append((await front.ask(prompt, lengths.generated)).latency_s)
            if len(latencies) >= due:
                half.set()

    async def long_request() -> Running:
        (prompt,) = random_prompts("long", [LONG_CONTEXT])
        await half.wait()
        return await front.ask(prompt, LONG_GENERATED)

    arrival = asyncio.create_task(long_request())
    await asyncio.gather(*(client() for _ in range(num_clients)))
    long = await arrival
    return LongResult(long.latency_s, long.first_token_s, sorted(latencies)[len(latencies) // 2])


async def most_blocks(served: Served, prompt: list[int], num_tokens: int, copies: int, **sampling: Any) -> int:
    """The most device blocks that requests for one prompt hold; each of `copies` requests has a salt of its own."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, (await served.device_pool()).used_block_count)
            await asyncio.sleep(0.005)

    watcher = asyncio.create_task(watch())
    salts = [f"{len(prompt)} {copies} {sampling} {copy}" for copy in range(copies)]
    calls = (served.ask(prompt, num_tokens, cache_salt=salt, **sampling) for salt in salts)
    await asyncio.gather(*calls)
    await _cancelled(watcher)
    return most


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Ends a task that runs for ever. Raises what it failed with, if it did: then it has measured nothing."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@dataclass(frozen=True)
class Saving:
    """Blocks at the most: of one request with four lines of tokens, and of four requests that share nothing."""

    name: str
    shared: int
    apart: int

    @property
    def share(self) -> float:
        return 1 - self.shared / self.apart


async def measure_sharing(served: Served, lengths: Lengths) -> list[Saving]:
    """n = 4 and 4 beams, at the trace's mean lengths."""
    (prompt,) = random_prompts("sharing", [lengths.context])
    apart = await most_blocks(served, prompt, lengths.generated, 4)
    samples = await most_blocks(served, prompt, lengths.generated, 1, n=4, seed=1, temperature=1)
    beams = await most_blocks(
        served, prompt, lengths.generated, 1, beam_search=sampling_pb2.BeamSearch(beam_width=4), temperature=1
    )
    return [Saving("n = 4", samples, apart), Saving("4 beams", beams, apart)]


def random_prompts(name: str, num_tokens: Sequence[int]) -> list[list[int]]:
    """Random token ids, the same for all sides."""
    rng = random.Random(name)
    return [rng.choices(TOKEN_IDS, k=count) for count in num_tokens]


# The report


@dataclass(frozen=True)
class Results:
    """Everything that was measured, by side."""

    trace: dict[str, TraceResult]
    long: dict[str, LongResult]
    savings: list[Saving]

    def table(self) -> str:
        """As Markdown: a column a side, then Octavo against each of the others."""
        trace, long = self.trace.values(), self.long.values()
        rows = [
            ["", *self.trace, "against padded", "against not padded", "goal"],
            ["---", *["---:"] * 6],
            ["KV memory in use that holds live tokens", *(f"{side.live_share:.1%}" for side in trace), "", "", "96 %"],
            _ratio_row("output tokens/s on the trace", [side.tokens_per_s for side in trace], "3.8 times"),
            _lower_row(
                f"latency of {LONG_CONTEXT:,} prompt tokens among short requests, s",
                [side.latency_s for side in long],
                "71 % lower",
            ),
            _lower_row("median latency of the short requests, s", [side.short_latency_s for side in long], ""),
        ]
        blocks = [["", "apart", "shared", "saved"], ["---", "---:", "---:", "---:"]]
        blocks += [[s.name, str(s.apart), str(s.shared), f"{s.share:.0%}"] for s in self.savings]
        return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, blocks))

    def charts(self) -> list[Chart]:
        """For the plot."""
        trace, long = self.trace.values(), self.long.values()
        return [
            Chart("KV memory in use that holds live tokens, %", [100 * side.live_share for side in trace], 100.0),
            Chart("Output tokens/s on the trace", [side.tokens_per_s for side in trace]),
            Chart(
                f"Latency of {LONG_CONTEXT:,} prompt tokens among short requests, s", [side.latency_s for side in long]
            ),
        ]


def _ratio_row(name: str, values: Sequence[float], goal: str) -> list[str]:
    *others, octavo = values
    return [name, *(f"{value:.1f}" for value in values), *(f"{octavo / other:.2f} times" for other in others), goal]


def _lower_row(name: str, values: Sequence[float], goal: str) -> list[str]:
    *others, octavo = values
    return [name, *(f"{value:.2f}" for value in values), *(f"{1 - octavo / other:.0%} lower" for other in others), goal]


def measure(served: Served, args: argparse.Namespace) -> Results:
    """Every scenario, side by side."""
    trace = load_trace(args.scale)
    short = [lengths for lengths in trace if lengths.context <= MAX_SHORT_CONTEXT * args.scale]
    short = [short[i % len(short)] for i in range(args.short_requests)]
    fronts: list[Front] = [Slots(served, pads=True), Slots(served, pads=False), Paged(served)]
    traced: dict[str, TraceResult] = {}
    long: dict[str, LongResult] = {}
    served.run(served.ask([*TOKEN_IDS[:600]], 32))
    for front in fronts:
        served.run(flush(served))
        traced[front.name] = served.run(run_trace(served, front, trace[: args.requests]))
        print(f"  trace  {front.name:<13} {traced[front.name]}", flush=True)
        served.run(flush(served))
        long[front.name] = served.run(run_long(front, short, args.clients))
        print(f"  long   {front.name:<13} {long[front.name]}", flush=True)
    mean = Lengths(
        sum(lengths.context for lengths in trace) // len(trace),
        sum(lengths.generated for lengths in trace) // len(trace),
    )
    savings = served.run(measure_sharing(served, mean))
    return Results(traced, long, savings)


async def flush(served: Served) -> None:
    """Forgets cached prefixes, so that a side does not find what another one has computed."""
    await served.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file or a folder; unset: the default model")
    parser.add_argument("--dtype", default="bfloat16", help="data type")
    parser.add_argument("--threads", type=int, default=2, help="compute threads")
    parser.add_argument("--requests", type=int, default=64, help="requests of the trace")
    parser.add_argument("--short-requests", type=int, default=64, help="requests around the long one")
    parser.add_argument("--clients", type=int, default=32, help="clients that send them")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the lengths of the trace")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file")
    parser.add_argument("--plot", type=Path, default=None, help="SVG file for the plot; unset: beside the JSON file")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    settings = {
        "model": str(args.model or installed_model()),
        "dtype": args.dtype,
        "quantization": "none",
        "num_threads": args.threads,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "num_device_blocks": NUM_SLOTS * MAX_MODEL_LEN // BLOCK_SIZE,
    }
    with Served(settings) as served:
        others = busy_cores()
        results = measure(served, args)
    where = machine()
    asked = {name: getattr(args, name) for name in ("requests", "short_requests", "clients", "scale")}
    path = write_results(args.results, "paging", others, settings=settings, **asked, **asdict(results))
    plot = args.plot or path.with_suffix(".svg")
    names = ["slots, static batches, padded", "slots, static batches", "Octavo"]
    write_bars(plot, names, results.charts())
    print(f"\n{results.table()}\n")
    print(f"{where['cpu']}, {where['cores']} cores; {args.dtype}, {args.threads} threads.")
    print(f"Everything: {path}; plot: {plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
