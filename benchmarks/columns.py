"""What is measured of every side, what was measured, and the ratios that are aimed at."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from served import TOKEN_IDS

DECODE, PREFILL, START = "decode", "prefill", "start"


@dataclass(frozen=True)
class Column:
    """`batch` requests at once; kind: whether output tokens or the prompts' are counted, by the second, or the seconds
    of a start themselves.
    """

    name: str
    kind: str
    batch: int = 1
    prompt_tokens: int = 32
    output_tokens: int = 128

    @property
    def unit(self) -> str:
        return {DECODE: "output tokens/s", PREFILL: "prompt tokens/s", START: "s"}[self.kind]

    def value(self, seconds: float) -> float:
        """What a run of so many seconds counts."""
        per_request = {DECODE: self.output_tokens, PREFILL: self.prompt_tokens}
        return seconds if self.kind == START else self.batch * per_request[self.kind] / seconds

    def prompts(self, round_number: int) -> list[list[int]]:
        """New random prompts every round, the same for all sides, so that no cache of prefixes helps any."""
        rng = random.Random(f"{self.name} {round_number}")
        return [rng.choices(TOKEN_IDS, k=self.prompt_tokens) for _ in range(self.batch)]


START_COLUMN = Column("start", START)
COLUMNS = (
    START_COLUMN,
    Column("batch 1", DECODE, 1),
    Column("batch 8", DECODE, 8),
    Column("batch 32", DECODE, 32),
    Column("batch 64", DECODE, 64, 128),
    Column("prefill 2,048", PREFILL, 1, 2048, 1),
)


@dataclass(frozen=True)
class Goal:
    """Least ratios of one of Octavo's sides to a rival's, by column; rival: a name, or empty for the best of all peers.
    mean: of their geometric mean, where there is one.
    """

    side: str
    rival: str
    ratios: Mapping[str, float]
    mean: float | None = None


_DECODES = ("batch 1", "batch 8", "batch 32", "batch 64")
_TO_THE_BEST = ({**dict.fromkeys(_DECODES, 1.5), "prefill 2,048": 1.3}, 1.8)
_TO_VLLM = {"batch 1": 2.0, "batch 8": 2.0, "batch 32": 1.25, "batch 64": 1.25, "prefill 2,048": 1.25}
# Peers are measured in their processes, without a server: the engine is what is like them.
GOALS = (
    Goal("engine", "", *_TO_THE_BEST),
    Goal("octavo", "", *_TO_THE_BEST),
    Goal("engine-bf16", "vllm", _TO_VLLM),
    Goal("octavo-bf16", "vllm", _TO_VLLM),
    Goal("octavo-bf16", "transformers", {"batch 1": 1.3, "batch 8": 1.5, "batch 32": 1.5, "prefill 2,048": 1.0}),
)
START_GOAL_S = 4.0


@dataclass(frozen=True)
class Turn:
    """One measurement. memory_gb_per_s: the machine's memory read just before it; facts: what else was measured."""

    column: str
    round_number: int
    side: str
    value: float
    memory_gb_per_s: float
    facts: Mapping[str, float] = field(default_factory=dict)


class Turns:
    """All measurements of a run, in their order; those of round 0 are warm-up and count for nothing."""

    def __init__(self, turns: Sequence[Turn] = ()) -> None:
        self.all = list(turns)

    def of(self, column: str, side: str) -> list[Turn]:
        """The turns that count."""
        return [turn for turn in self.all if turn.round_number and (turn.column, turn.side) == (column, side)]

    def median(self, column: str, side: str) -> float | None:
        """None where the side was not measured."""
        values = [turn.value for turn in self.of(column, side)]
        return statistics.median(values) if values else None

    def fact(self, column: str, side: str, name: str) -> float | None:
        """The median of a fact; None where it was not measured."""
        values = [turn.facts[name] for turn in self.of(column, side) if name in turn.facts]
        return statistics.median(values) if values else None

    def memory_gb_per_s(self, column: str) -> float:
        """The median over a column's turns."""
        return statistics.median(turn.memory_gb_per_s for turn in self.all if turn.column == column)

    def columns(self) -> list[str]:
        """Names of the columns with turns that count, in their order."""
        return list(dict.fromkeys(turn.column for turn in self.all if turn.round_number))


@dataclass(frozen=True)
class Ratio:
    """A side against a rival in one column; goal: the least that is aimed at, None for none."""

    column: str
    side: str
    rival: str
    value: float
    goal: float | None


@dataclass(frozen=True)
class Comparison:
    """A goal and what was measured of it. mean: the ratios' geometric mean, where all of its columns were measured."""

    goal: Goal
    ratios: tuple[Ratio, ...]
    mean: float | None

    def as_json(self) -> dict[str, Any]:
        """For the results."""
        ratios = [{"column": r.column, "rival": r.rival, "ratio": r.value, "goal": r.goal} for r in self.ratios]
        return {
            "side": self.goal.side,
            "rival": self.goal.rival or "the best peer",
            "ratios": ratios,
            "geometric_mean": self.mean,
            "geometric_mean_goal": self.goal.mean,
        }


def compare(goal: Goal, turns: Turns, peers: Sequence[str]) -> Comparison | None:
    """None where nothing of it was measured. peers: whom "the best peer" is chosen from, column by column."""
    ratios = []
    for column in COLUMNS:
        ours = turns.median(column.name, goal.side)
        rivals = {
            name: value
            for name in ([goal.rival] if goal.rival else peers)
            if (value := turns.median(column.name, name)) is not None
        }
        if column.kind == START or ours is None or not rivals:
            continue
        best = max(rivals, key=lambda name: rivals[name])
        ratios.append(Ratio(column.name, goal.side, best, ours / rivals[best], goal.ratios.get(column.name)))
    if not ratios:
        return None
    are_all = {ratio.column for ratio in ratios} >= set(goal.ratios)
    return Comparison(goal, tuple(ratios), statistics.geometric_mean(r.value for r in ratios) if are_all else None)
