"""Octavo and transformers' `generate`, side by side in one run, with the same prompts.

    make bench
    python benchmarks/bench_serving.py --peer-python .venv-bench/bin/python --rounds 5

Both stay loaded, one is busy at a time, and they take turns: Octavo, transformers, Octavo, transformers. What is
compared are medians. Octavo is measured as it is served: a router and a worker, streams over gRPC, text and tokens.
README.md in this folder says what each number means.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from machine import busy_cores, installed_model, machine
from served import TOKEN_IDS, Served

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Workload:
    """`batch` requests at once. The rate counts output tokens, or the prompt's where only one token is generated."""

    name: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    goal: float

    @property
    def counts_prompt(self) -> bool:
        return self.output_tokens == 1

    @property
    def num_counted(self) -> int:
        return self.batch * (self.prompt_tokens if self.counts_prompt else self.output_tokens)

    def prompts(self, round_number: int) -> list[list[int]]:
        """New random prompts every round, so that no cache of prefixes helps either side."""
        rng = random.Random(f"{self.name} {round_number}")
        return [rng.choices(TOKEN_IDS, k=self.prompt_tokens) for _ in range(self.batch)]


WORKLOADS = (
    Workload("output tokens/s, batch 1", 1, 32, 128, 1.3),
    Workload("output tokens/s, batch 8", 8, 32, 128, 1.5),
    Workload("output tokens/s, batch 32", 32, 32, 128, 1.5),
    Workload("prompt tokens/s, 2,048", 1, 2048, 1, 1.0),
)


class Side(Protocol):
    """One of the two that are compared."""

    name: str
    versions: dict[str, str]

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Generates `num_tokens` tokens behind each prompt, all at once; the seconds until the last one came."""

    def close(self) -> None: ...


class OctavoSide:
    """A router and a worker, asked over gRPC with one stream a prompt."""

    name = "octavo"

    def __init__(self, settings: dict[str, Any]) -> None:
        self._served = Served(settings)
        self.versions = self._served.versions

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        return self._served.run(self._run(prompts, num_tokens))

    async def _run(self, prompts: list[list[int]], num_tokens: int) -> float:
        begin = time.perf_counter()
        done = await asyncio.gather(*(self._served.ask(prompt, num_tokens) for prompt in prompts))
        seconds = time.perf_counter() - begin
        counts = {running.num_received for running in done}
        if counts != {num_tokens}:
            raise RuntimeError(f"octavo generated {sorted(counts)} tokens a prompt instead of {num_tokens}")
        return seconds

    def close(self) -> None:
        self._served.close()


class PeerSide:
    """transformers in a process and an environment of its own; `transformers_peer.py` is its other end."""

    def __init__(self, python: Path, model: Path, dtype: str, threads: int) -> None:
        command = [str(python), str(HERE / "transformers_peer.py"), f"--model={model}", f"--dtype={dtype}"]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [*command, f"--threads={threads}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        hello = self._read()
        self.name: str = hello["name"]
        self.versions: dict[str, str] = hello["versions"]

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer["num_tokens"] != num_tokens * len(prompts):
            raise RuntimeError(f"{self.name} generated {answer['num_tokens']} tokens, not {num_tokens * len(prompts)}")
        return float(answer["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
            raise RuntimeError(f"the peer ended with code {code}; to see why, run: {command}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@dataclass(frozen=True)
class Result:
    """A workload's rates in tokens/s, one a round, of both sides."""

    workload: Workload
    octavo: list[float]
    peer: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.octavo) / statistics.median(self.peer)


class Bench:
    """Both sides, loaded; a context manager that closes them."""

    def __init__(self, octavo: Side, peer: Side) -> None:
        self.octavo, self.peer = octavo, peer

    def measure(self, workload: Workload, rounds: int) -> Result:
        """Runs a workload in turns, after one round of each that is not counted."""
        rates: dict[str, list[float]] = {self.octavo.name: [], self.peer.name: []}
        for round_number in range(rounds + 1):
            for side in (self.octavo, self.peer):
                seconds = side.run(workload.prompts(round_number), workload.output_tokens)
                rate = workload.num_counted / seconds
                label = f"round {round_number} of {rounds}" if round_number else "warm-up"
                print(f"  {workload.name:<26} {label:<14} {side.name:<13} {rate:9.1f}", flush=True)
                if round_number:
                    rates[side.name].append(rate)
        return Result(workload, rates[self.octavo.name], rates[self.peer.name])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.octavo.close()
        self.peer.close()


def table(results: list[Result], peer_name: str) -> str:
    """The results as a Markdown table: medians, their ratio, and the ratio aimed at."""
    rows = [f"| | octavo | {peer_name} | ratio | goal |", "|---|---:|---:|---:|---:|"]
    for result in results:
        octavo, peer = statistics.median(result.octavo), statistics.median(result.peer)
        rows.append(
            f"| {result.workload.name} | {octavo:.1f} | {peer:.1f} | {result.ratio:.2f} | {result.workload.goal} |"
        )
    return "\n".join(rows)


def write_results(path: Path, results: list[Result], **facts: Any) -> None:
    """Everything that was measured, as JSON."""
    measured = [
        {**asdict(result.workload), "octavo": result.octavo, "peer": result.peer, "ratio": result.ratio}
        for result in results
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "results": measured}, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--peer-python", type=Path, required=True, help="Python of an environment with transformers")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file or a folder; unset: the default model")
    parser.add_argument("--dtype", default="bfloat16", help="data type of both sides")
    parser.add_argument(
        "--quantization", default="none", help="Octavo's; auto is what a quantized file is served with by default"
    )
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side")
    parser.add_argument("--rounds", type=int, default=3, help="measured turns of each side")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the workloads whose name has this text")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be at least 1")
    return args


def main() -> int:
    args = arguments()
    model = args.model or installed_model()
    workloads = [workload for workload in WORKLOADS if args.only in workload.name]
    print(f"loading {model.name} on both sides", flush=True)
    peer = PeerSide(args.peer_python, model, args.dtype, args.threads)
    try:
        settings = {"dtype": args.dtype, "quantization": args.quantization, "num_threads": args.threads}
        octavo = OctavoSide({"model": str(model), **settings})
    except BaseException:
        peer.close()
        raise
    with Bench(octavo, peer) as bench:
        others = busy_cores()
        results = [bench.measure(workload, args.rounds) for workload in workloads]
    now = datetime.now(UTC)
    path = args.results / f"serving-{now:%Y%m%d-%H%M%S}.json"
    versions = {octavo.name: octavo.versions, peer.name: peer.versions}
    where = machine()
    write_results(
        path,
        results,
        time=now.isoformat(),
        machine=where,
        busy_cores=round(others, 2),
        versions=versions,
        dtype=args.dtype,
        threads=args.threads,
    )
    print(f"\n{table(results, peer.name)}\n")
    print(f"{where['cpu']}, {where['cores']} cores; {args.dtype}, {args.threads} threads; medians of {args.rounds}.")
    print(f"Every round: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
