"""What a run measures: rows with a name, numbers and a goal, as tables for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ORACLE = "the oracle"
"""What rows stand against that say whether results are equal."""


@dataclass(frozen=True)
class Row:
    """One thing that was measured.

    name: what; value, unit: the figure; ratio: it beside its floor, its peer or its goal's base, None where there is
    none; against: what that is; at_least, at_most: what the ratio is to be, None for anything; facts: whatever else was
    seen.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    against: str = ""
    at_least: float | None = None
    at_most: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def goal(self) -> str:
        """For people; empty where there is none."""
        if self.at_least is not None:
            return f"{self.at_least:g} or more"
        return "" if self.at_most is None else f"{self.at_most:g} or less"

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is; None where there is none, or nothing to hold against it."""
        if self.ratio is None or not self.goal:
            return None
        return self.ratio >= self.at_least if self.at_least is not None else self.ratio <= (self.at_most or 0.0)

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        return (
            self.name,
            f"{_shown(self.value)} {self.unit}".strip(),
            "" if self.ratio is None else _shown(self.ratio),
            self.against,
            self.goal,
        )

    def as_json(self) -> dict[str, Any]:
        """For the results."""
        return asdict(self)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    return _markdown([("what", "measured", "ratio", "to", "goal"), *(row.cells() for row in rows)])


def goals(rows: Sequence[Row]) -> str:
    """The rows that have a goal, with what became of it, as Markdown; those against the oracle are counted."""
    verdicts = {True: "met", False: "MISSED", None: ""}
    chosen = [row for row in rows if row.goal and row.against != ORACLE]
    shown = _markdown(
        [
            ("goal", "measured", "ratio", "is to be", ""),
            *((*_without_against(row), verdicts[row.is_met]) for row in chosen),
        ]
    )
    compared = [row for row in rows if row.against == ORACLE]
    return f"{shown}\n\nequal to the oracle: {sum(row.is_met is True for row in compared)} of {len(compared)} compared"


def _without_against(row: Row) -> tuple[str, ...]:
    name, measured, ratio, _, goal = row.cells()
    return name, measured, ratio, goal


def _markdown(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
