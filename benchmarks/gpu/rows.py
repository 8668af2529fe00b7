"""What a run measures: rows with a name, numbers and a goal, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One thing that was measured.

    name: what; value, unit: the figure; ratio: it beside its floor, its peer or its goal's base, None where there is
    none; against: what that is; goal: what the ratio is to be, for people; facts: whatever else was seen.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    against: str = ""
    goal: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        return (
            self.name,
            f"{_shown(self.value)} {self.unit}".strip(),
            "" if self.ratio is None else f"{self.ratio:.3f}",
            self.against,
            self.goal,
        )

    def as_json(self) -> dict[str, Any]:
        """For the results."""
        return asdict(self)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    cells = [("what", "measured", "ratio", "to", "goal"), *(row.cells() for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
