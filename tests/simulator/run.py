"""Runs the simulator over many seeds, on every core.

    python -m tests.simulator.run --seeds 2000          seeds 0 to 1999
    python -m tests.simulator.run --seeds 9000:9040     seeds 9000 to 9039
    python -m tests.simulator.run --seeds 9007:9008 --trace

Prints how far it is, and for a seed that fails the scenario, the last things that happened, what is wrong, and the
command that replays it alone. Exits 1 if a seed failed, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields

from tests.simulator.scenario import STEPS, Features, draw_scenario
from tests.simulator.world import World

LINES_SHOWN = 40
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Task:
    """One seed to run."""

    seed: int
    num_steps: int = STEPS
    features: Features = field(default_factory=Features)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed. error: None where all is well."""

    seed: int
    counts: Counter[str]
    error: str | None = None


def simulate(task: Task) -> Outcome:
    """Runs one seed. Never raises for what the simulation finds."""
    world = World(draw_scenario(task.seed, num_steps=task.num_steps, features=task.features))
    try:
        return Outcome(task.seed, world.run())
    except Exception:
        report = [world.scenario.describe(), "", "the last things that happened:"]
        report += world.lines[-LINES_SHOWN:]
        report += ["", traceback.format_exc().rstrip()]
        return Outcome(task.seed, world.counts, "\n".join(report))


def simulate_all(tasks: Sequence[Task], jobs: int) -> Generator[Outcome, None, None]:
    """Runs seeds in so many processes, and gives each outcome when it is there. Closing it ends the processes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_ignore_interrupts) as pool:
        yield from pool.imap_unordered(simulate, tasks, chunksize=2)


def main(arguments: list[str] | None = None) -> int:
    """The program. Returns its exit code."""
    options = _parse(arguments)
    features = Features(**dict.fromkeys(options.without, False))
    tasks = [Task(seed, options.steps, features) for seed in options.seeds]
    if options.trace:
        return _trace(tasks)
    progress = _Progress(len(tasks))
    outcomes = simulate_all(tasks, options.jobs)
    try:
        with closing(outcomes):
            for outcome in outcomes:
                progress.take(outcome)
                if outcome.error is not None:
                    progress.clear()
                    print(f"seed {outcome.seed} failed\n{outcome.error}")
                    print(f"replay it alone: {_replay(outcome.seed, options)}\n", flush=True)
                    if len(progress.failed) >= options.max_failures:
                        print(f"stopping at {len(progress.failed)} failures")
                        break
                progress.show()
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted: {progress}", file=sys.stderr)
        return INTERRUPTED
    progress.clear()
    print(", ".join(f"{name} {count}" for name, count in sorted(progress.counts.items())))
    print(progress)
    return 1 if progress.failed else 0


def _trace(tasks: list[Task]) -> int:
    """Runs seeds in this process and prints everything that happens."""
    for task in tasks:
        world = World(draw_scenario(task.seed, num_steps=task.num_steps, features=task.features), echo=True)
        print(world.scenario.describe())
        try:
            counts = world.run()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            return 1
        print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.run", description="Simulates the router's core.")
    parser.add_argument("--seeds", type=_seeds, default=range(200), help="a count, or a range such as 9000:9040")
    parser.add_argument("--steps", type=int, default=STEPS, help="answered steps of each seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--max-failures", type=int, default=5, help="failing seeds to stop behind")
    parser.add_argument("--trace", action="store_true", help="print everything that happens, in this process")
    names = [entry.name for entry in fields(Features)]
    parser.add_argument("--without", nargs="*", choices=names, default=[], help="features to leave out")
    options = parser.parse_args(arguments)
    if not options.seeds:
        parser.error("no seeds to run")
    return options


def _seeds(text: str) -> range:
    """A count, or first:behind."""
    first, colon, behind = text.rpartition(":")
    try:
        return range(int(first), int(behind)) if colon else range(int(behind))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a count nor a range such as 9000:9040") from None


def _replay(seed: int, options: argparse.Namespace) -> str:
    parts = [f"python -m tests.simulator.run --seeds {seed}:{seed + 1} --trace"]
    if options.steps != STEPS:
        parts.append(f"--steps {options.steps}")
    if options.without:
        parts.append("--without " + " ".join(options.without))
    return " ".join(parts)


def _ignore_interrupts() -> None:
    """Ctrl-C is for the process that people see; it ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Progress:
    """What is done, and a line about it that is written over where somebody is looking."""

    def __init__(self, num_tasks: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[int] = []
        self._num_tasks = num_tasks
        self._num_done = 0
        self._started_at = time.monotonic()
        self._shown_at = 0.0
        self._is_seen = sys.stderr.isatty()

    def take(self, outcome: Outcome) -> None:
        """One more seed is done."""
        self._num_done += 1
        for name, count in outcome.counts.items():
            self.counts[name] = max(self.counts[name], count) if name.startswith("most ") else self.counts[name] + count
        if outcome.error is not None:
            self.failed.append(outcome.seed)

    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self._started_at
        failed = f"failed: {' '.join(map(str, sorted(self.failed)))}" if self.failed else "none failed"
        rate = 60 * self._num_done / elapsed_s
        return f"{self._num_done} of {self._num_tasks} seeds in {elapsed_s:.1f} s, {rate:.0f} a minute; {failed}"

    def show(self) -> None:
        """Writes the line, unless it was written a moment ago."""
        now = time.monotonic()
        if now - self._shown_at < (0.2 if self._is_seen else 10.0):
            return
        self._shown_at = now
        line = f"\r{self!s:<100}" if self._is_seen else f"{self}\n"
        print(line, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Wipes the line, so that something else can be printed."""
        if self._is_seen:
            print(f"\r{'':<100}\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
