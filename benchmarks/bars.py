"""A plot of groups of bars as an SVG file, written by hand: no plotting library is needed to run a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

_WIDTH, _LEFT, _RIGHT, _TOP = 720, 24, 96, 56
_BAR, _GAP, _TITLE, _SPACE = 22, 4, 24, 22
_OTHERS = ("#d5d9df", "#9aa3af", "#6b7480", "#bfc6cf", "#4a525c")
_OURS = ("#2f6fb3", "#8db4de", "#1d8a6b", "#86cdb7")
_TEXT = 'font-family="Helvetica, Arial, sans-serif" fill="#24292f"'


@dataclass(frozen=True)
class Chart:
    """A title and the values to compare. most: the value of a full bar; None: the largest of them."""

    title: str
    values: Sequence[float]
    most: float | None = None

    @property
    def height(self) -> int:
        return _TITLE + len(self.values) * (_BAR + _GAP) + _SPACE


def write_bars(path: Path, names: Sequence[str], charts: Sequence[Chart], *, num_highlighted: int = 1) -> None:
    """Writes the charts below each other, each with a scale of its own, under a legend with the names of the bars.
    The last of them, at most four, are highlighted; five others fit.
    """
    colors = [*_OTHERS[: len(names) - num_highlighted], *_OURS[:num_highlighted]]
    height = _TOP + sum(chart.height for chart in charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, color) in enumerate(zip(names, colors, strict=True)):
        x = _LEFT + number * (_WIDTH - 2 * _LEFT) // len(names)
        parts.append(f'<rect x="{x}" y="18" width="14" height="14" fill="{color}"/>')
        parts.append(f'<text x="{x + 20}" y="30" font-size="13" {_TEXT}>{escape(name)}</text>')
    top = _TOP
    for chart in charts:
        parts += _chart(chart, top, colors)
        top += chart.height
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _chart(chart: Chart, top: int, colors: Sequence[str]) -> list[str]:
    most = chart.most or max(chart.values) or 1.0
    parts = [f'<text x="{_LEFT}" y="{top + 14}" font-size="14" font-weight="bold" {_TEXT}>{escape(chart.title)}</text>']
    for row, (value, color) in enumerate(zip(chart.values, colors, strict=True)):
        y = top + _TITLE + row * (_BAR + _GAP)
        width = max(1.0, value / most * (_WIDTH - _LEFT - _RIGHT))
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{color}"/>')
        parts.append(f'<text x="{_LEFT + width + 8:.1f}" y="{y + 16}" font-size="13" {_TEXT}>{_shown(value)}</text>')
    return parts


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
