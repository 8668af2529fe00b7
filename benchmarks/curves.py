"""A plot of curves over a logarithmic axis as an SVG file, written by hand as `bars.py`'s are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 64, 24, 72, 52
_COLORS = ("#2f6fb3", "#9aa3af", "#b3572f")
_TEXT = 'font-family="Helvetica, Arial, sans-serif" fill="#24292f"'


@dataclass(frozen=True)
class Curve:
    """A name and its points (x, y), by x, both above 0."""

    name: str
    points: Sequence[tuple[float, float]]


def write_curves(path: Path, *, title: str, x_name: str, y_name: str, curves: Sequence[Curve]) -> None:
    """Writes curves, at most three, into one frame with logarithmic axes."""
    xs = sorted({x for curve in curves for x, _ in curve.points})
    ys = [y for curve in curves for _, y in curve.points]
    low = 10 ** math.floor(math.log10(min(ys)))
    high = max(10 * low, 10 ** math.ceil(math.log10(max(ys))))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place_x(x: float) -> float:
        return _LEFT + (right - _LEFT) * (math.log(x / xs[0]) / math.log(xs[-1] / xs[0]) if len(xs) > 1 else 0.5)

    def place_y(y: float) -> float:
        return bottom - (bottom - _TOP) * math.log(y / low) / math.log(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="26" font-size="15" font-weight="bold" {_TEXT}>{escape(title)}</text>',
        f'<text x="{(_LEFT + right) // 2}" y="{_HEIGHT - 12}" font-size="13" text-anchor="middle" {_TEXT}>'
        f"{escape(x_name)}</text>",
        f'<text x="{right}" y="26" font-size="13" text-anchor="end" {_TEXT}>{escape(y_name)}</text>',
    ]
    for y in _ticks(low, high):
        parts.append(f'<path d="M{_LEFT} {place_y(y):.1f}H{right}" stroke="#d5d9df"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{place_y(y) + 4:.1f}" font-size="12" text-anchor="end" {_TEXT}>{y:g}</text>'
        )
    for x in xs:
        parts.append(
            f'<text x="{place_x(x):.1f}" y="{bottom + 18}" font-size="12" text-anchor="middle" {_TEXT}>{x:g}</text>'
        )
    for number, (curve, color) in enumerate(zip(curves, _COLORS, strict=False)):
        line = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in curve.points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        parts += [
            f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3.5" fill="{color}"/>' for x, y in curve.points
        ]
        left = _LEFT + number * 200
        parts.append(f'<rect x="{left}" y="42" width="14" height="14" fill="{color}"/>')
        parts.append(f'<text x="{left + 20}" y="54" font-size="13" {_TEXT}>{escape(curve.name)}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten."""
    powers = range(round(math.log10(low)), round(math.log10(high)))
    return [*(factor * 10.0**power for power in powers for factor in (1, 2, 5)), high]
