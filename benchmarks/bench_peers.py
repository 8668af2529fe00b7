"""Octavo and other programs that serve models on CPUs, side by side in one run, with the same prompts.

    make bench-peers
    make bench-peers ARGS="--peers openvino,vllm --rounds 5"
    make bench-peers ARGS="--only 'batch 1,batch 8'"

All sides stay loaded, one is busy at a time, and they take turns: A B C D A B C D. What is compared are medians. Octavo
is measured as its engine alone, which is what the peers are, and as it is served: a router and a worker, streams over
gRPC, text and tokens; then over HTTP. README.md in this folder says what each number means.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import report
from columns import COLUMNS, GOALS, START_COLUMN, Column, Comparison, Turn, Turns, compare
from engine import EngineSide
from floor import MemoryProbe
from machine import busy_cores, free_gib, installed_model, machine, write_results
from processes import busy_share, go_on, halt, resident_gib
from sides import ROOT, Answer, OctavoSide, PeerSide, Side, SideError, SideSpec

HERE = Path(__file__).resolve().parent
PEERS = ("llama.cpp", "openvino", "vllm")
ALL_PEERS = (*PEERS, "transformers")
_BF16 = {"dtype": "bfloat16", "quantization": "none"}
ENGINE = "engine"
ENGINES: dict[str, dict[str, Any]] = {ENGINE: {}, "engine-bf16": _BF16}
SERVED: dict[str, dict[str, Any]] = {"octavo": {}, "octavo-bf16": _BF16}
MODES = SERVED | ENGINES
SECTION = report.SERVED.name
PROBE_TRIES = 5
IDLE_S = 1.0
IDLE_TRIES = 8
MOST_IDLE_CORES = 0.02
LEAST_FREE_GIB = 1.5


@dataclass
class Loaded:
    """A side that runs. idle_cores: what it burns while nobody asks it; one that burns much is halted between its
    turns.
    """

    spec: SideSpec
    side: Side
    idle_cores: float = 0.0
    is_halted: bool = False

    def check_idle(self) -> None:
        """Measures it, and says what it finds."""
        for _ in range(IDLE_TRIES):  # what has to be done once behind a start is no unrest
            self.idle_cores = busy_share(self.side.pid, IDLE_S)
            if self.idle_cores <= MOST_IDLE_CORES:
                break
        held = f"{resident_gib(self.side.pid):.1f} GiB"
        print(f"  {self.spec.name} is loaded ({self.side.about}): {held}, idle it takes {self.idle_cores:.2f} cores")
        if self.idle_cores > MOST_IDLE_CORES:
            print(f"  {self.spec.name} does not rest: it is halted while others have their turns", flush=True)
            self.rest()

    def rest(self) -> None:
        """Its turn is over."""
        if self.idle_cores > MOST_IDLE_CORES:
            halt(self.side.pid)
            self.is_halted = True

    def wake(self) -> None:
        """Its turn begins."""
        if self.is_halted:
            go_on(self.side.pid)
            self.is_halted = False

    def close(self) -> None:
        self.wake()
        self.side.close()


class Bench:
    """The sides and what was measured of them; a context manager that ends them.

    left_out: why a side is missing, by its name.
    """

    def __init__(self, specs: Sequence[SideSpec], probe: MemoryProbe) -> None:
        self._waiting = list(specs)
        self._probe = probe
        self.loaded: dict[str, Loaded] = {}
        self.left_out: dict[str, str] = {}
        self.turns = Turns()

    def load(self, rounds: int) -> None:
        """Starts all sides, so many times each behind a first time that does not count, and keeps the last. Those that
        cannot start are left out.
        """
        for number in range(rounds + 1):
            for spec in self._waiting:
                if spec.name in self.left_out:
                    continue
                if (before := self.loaded.pop(spec.name, None)) is not None:
                    before.close()
                memory = self._memory_gb_per_s()
                try:
                    self.loaded[spec.name] = Loaded(spec, spec.start())
                except SideError as error:
                    self.leave_out(spec.name, str(error))
                    continue
                self._note(START_COLUMN, number, rounds, spec.name, self.loaded[spec.name].side.start_s, memory, {})
        for loaded in self.loaded.values():
            loaded.check_idle()
        if (free := free_gib()) < LEAST_FREE_GIB:
            print(f"WARNING: only {free:.1f} GiB of memory are left; leave out a peer by --peers", flush=True)

    def leave_out(self, name: str, why: str) -> None:
        """Goes on without a side, and says so."""
        self.left_out[name] = why
        print(f"\n*** {name} IS LEFT OUT: {why}\n", flush=True)

    def measure(self, column: Column, rounds: int) -> None:
        """Runs a column in turns, after one round that is not counted."""
        for number in range(rounds + 1):
            prompts = column.prompts(number)
            for name, loaded in list(self.loaded.items()):
                run = partial(loaded.side.run, prompts, column.output_tokens)
                self._turn(column, number, rounds, name, name, run)

    def measure_served(self, octavo: OctavoSide, engine: EngineSide, rounds: int) -> None:
        """The served product and its engine alone, in turns."""
        column = report.SERVED
        event = b""

        def over_http(prompts: list[list[int]]) -> Answer:
            nonlocal event
            answer, event = octavo.run_http(prompts, column.output_tokens)
            return answer

        ways: dict[str, Callable[[list[list[int]]], Answer]] = {
            report.HTTP: over_http,
            report.ENGINE_LOADED: lambda prompts: engine.run(prompts, column.output_tokens, event),
            report.GRPC: lambda prompts: octavo.run(prompts, column.output_tokens),
            report.ENGINE: lambda prompts: engine.run(prompts, column.output_tokens),
        }
        for number in range(rounds + 1):
            for number_of_way, (way, run) in enumerate(ways.items()):
                prompts = column.prompts(number * len(ways) + number_of_way)  # one server sees them all: none twice
                side = octavo.name if way in (report.HTTP, report.GRPC) else engine.name
                self._turn(column, number, rounds, side, way, partial(run, prompts))

    def _turn(self, column: Column, number: int, rounds: int, side: str, shown: str, run: Callable[[], Answer]) -> None:
        """Measures once. A side that fails is left out from then on."""
        loaded = self.loaded[side]
        memory = self._memory_gb_per_s()
        loaded.wake()
        try:
            answer = run()
        except (SideError, OSError) as error:
            self.leave_out(side, str(error))
            self.loaded.pop(side).close()
            return
        loaded.rest()
        self._note(column, number, rounds, shown, column.value(answer.seconds), memory, answer.facts)

    def _note(
        self, column: Column, number: int, rounds: int, side: str, value: float, memory: float, facts: dict[str, float]
    ) -> None:
        self.turns.all.append(Turn(column.name, number, side, value, memory, facts))
        label = f"round {number} of {rounds}" if number else "warm-up"
        print(
            f"  {column.name:<16} {label:<14} {side:<20} {value:9.2f} {column.unit:<15} {memory:4.0f} GB/s", flush=True
        )

    def _memory_gb_per_s(self) -> float:
        return self._probe.bytes_per_s(PROBE_TRIES) / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for loaded in self.loaded.values():
            loaded.close()


def peer_python(name: str) -> Path:
    """The Python of a peer's environment, which is made if it is not there. Raises SideError where that fails."""
    venv = ROOT / f".venv-bench-{name}"
    made = subprocess.run([sys.executable, str(ROOT / "scripts" / "setup.py"), f"--venv={venv}", f"--peer={name}"])
    if made.returncode != 0:
        raise SideError(f"its environment {venv.name} could not be made; setup's message is above")
    return venv / "bin" / "python"


def octavo_spec(name: str, model: Path, threads: int) -> SideSpec:
    """One of Octavo's modes, served, or its engine alone."""
    settings = {**MODES[name], "num_threads": threads}
    kind = EngineSide if name in ENGINES else OctavoSide
    return SideSpec(name, lambda: kind(name, model, settings), is_ours=True)


def peer_spec(name: str, model: Path, threads: int) -> SideSpec:
    """A peer. Raises SideError as `peer_python` does."""
    python = peer_python(name)
    script = HERE / "peers" / f"{name.replace('.', '_')}_peer.py"
    return SideSpec(name, lambda: PeerSide(name, script, python, model, "bfloat16", threads), is_ours=False)


def chosen(text: str, known: Sequence[str], option: str, parser: argparse.ArgumentParser) -> list[str]:
    """The names in a list with commas. Ends the program for one that is not known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            parser.error(f"{option} names {name!r}; known are {', '.join(known)}")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(ALL_PEERS)}; empty for none")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="only what has one of these texts, with commas, in its name: "
        f"{'; '.join(column.name for column in COLUMNS)}; {SECTION}",
    )
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; unset: the default model")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side")
    parser.add_argument("--rounds", type=int, default=3, help="measured turns of each side")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the JSON file and the plot")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be at least 1")
    args.peers = chosen(args.peers, ALL_PEERS, "--peers", parser)
    args.modes = chosen(args.modes, tuple(MODES), "--modes", parser)
    wanted = [text.strip() for text in args.only.split(",") if text.strip()] or [""]
    args.only = [name for name in (*(c.name for c in COLUMNS), SECTION) if any(text in name for text in wanted)]
    return args


def run(bench: Bench, args: argparse.Namespace, model: Path) -> None:
    """Measures all that is asked for."""
    # Loading is a start that does not count.
    bench.load(args.rounds if START_COLUMN.name in args.only else 0)
    for column in COLUMNS:
        if column is not START_COLUMN and column.name in args.only:
            bench.measure(column, args.rounds)
    octavo = bench.loaded.get("octavo")
    if SECTION in args.only and octavo is not None:
        if ENGINE not in bench.loaded:
            try:
                spec = octavo_spec(ENGINE, model, args.threads)
                bench.loaded[ENGINE] = Loaded(spec, spec.start())
            except SideError as error:
                bench.leave_out(ENGINE, str(error))
                return
            bench.loaded[ENGINE].check_idle()
        engine = bench.loaded[ENGINE].side
        assert isinstance(octavo.side, OctavoSide)
        assert isinstance(engine, EngineSide)
        bench.measure_served(octavo.side, engine, args.rounds)


def show(turns: Turns, comparisons: Sequence[Comparison], ours: Sequence[str], peers: Sequence[str]) -> None:
    """Prints the tables that there is something in."""
    texts = [
        report.rates_table(turns, [*peers, *ours]),
        *(report.ratios_table(comparison) for comparison in comparisons),
        report.start_line(turns, "octavo"),
        report.idle_table(turns, ours),
        report.served_table(turns),
    ]
    print("\n" + "\n\n".join(text for text in texts if text) + "\n")


def main() -> int:
    args = arguments()
    model = (args.model or installed_model()).resolve()
    failed: dict[str, str] = {}
    specs = [octavo_spec(name, model, args.threads) for name in args.modes]
    for name in args.peers:
        try:
            specs.append(peer_spec(name, model, args.threads))
        except SideError as error:
            failed[name] = str(error)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # sides are ended then too
    print(f"loading {model.name} on {', '.join(spec.name for spec in specs)}", flush=True)
    others = busy_cores()
    with Bench(specs, MemoryProbe(args.threads)) as bench:
        for name, why in failed.items():
            bench.leave_out(name, why)
        run(bench, args, model)
        loaded = dict(bench.loaded)
    turns = bench.turns
    if not turns.columns():
        print("nothing was measured", file=sys.stderr)
        return 1
    peers = [spec.name for spec in specs if not spec.is_ours and spec.name in loaded]
    comparisons = [found for goal in GOALS if (found := compare(goal, turns, peers)) is not None]
    path = write_results(
        args.results,
        "peers",
        others,
        model=model.name,
        threads=args.threads,
        rounds=args.rounds,
        sides={
            name: {"about": one.side.about, "versions": one.side.versions, "idle_cores": round(one.idle_cores, 3)}
            for name, one in loaded.items()
        },
        left_out=bench.left_out,
        comparisons=[comparison.as_json() for comparison in comparisons],
        turns=[asdict(turn) for turn in turns.all],
    )
    report.write_plot(path.with_suffix(".svg"), turns, args.modes, peers)
    show(turns, comparisons, [name for name in args.modes if name in loaded], peers)
    where = machine()
    print(f"{where['cpu']}, {where['cores']} cores; {args.threads} threads a side; medians of {args.rounds}.")
    for name, why in bench.left_out.items():
        print(f"left out: {name}: {why.splitlines()[0]}")
    print(f"Every turn: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
