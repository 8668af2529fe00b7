"""The tables and the plot of `bench_peers.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from bars import Chart, write_bars
from columns import COLUMNS, START, START_COLUMN, START_GOAL_S, Column, Comparison, Turns

OUTPUT_GOAL = 0.9
IDLE_GOALS = {"batch 1": 0.10, "batch 32": 0.03}
SERVED = Column("served, batch 32", "decode", 32)
HTTP, GRPC, ENGINE, ENGINE_LOADED = "HTTP", "gRPC", "engine alone", "engine, clients busy"


def rates_table(turns: Turns, sides: Sequence[str]) -> str:
    """Markdown: a row a side, medians."""
    columns = [column for column in COLUMNS if column.name in turns.columns()]
    rows = [
        "| | " + " | ".join(f"{column.name}, {column.unit}" for column in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for side in sides:
        values = [turns.median(column.name, side) for column in columns]
        cells = [
            "–" if value is None else f"{value:.2f}" if column.kind == START else f"{value:.0f}"
            for value, column in zip(values, columns, strict=True)
        ]
        rows.append(f"| {side} | {' | '.join(cells)} |")
    memory = [f"{turns.memory_gb_per_s(column.name):.0f}" for column in columns]
    rows.append(f"| memory read, GB/s | {' | '.join(memory)} |")
    return "\n".join(rows)


def ratios_table(comparison: Comparison) -> str:
    """Markdown: a row a column, with the rival, and the geometric mean."""
    goal = comparison.goal
    rows = [f"| {goal.side} against | | ratio | goal | |", "|---|---|---:|---:|---|"]
    for ratio in comparison.ratios:
        rows.append(_row(ratio.column, ratio.rival, ratio.value, ratio.goal))
    if comparison.mean is not None:
        rows.append(_row("geometric mean", goal.rival or "the best of each", comparison.mean, goal.mean))
    return "\n".join(rows)


def _row(name: str, rival: str, value: float, goal: float | None) -> str:
    shown = "" if goal is None else f"{goal:g}"
    return f"| {name} | {rival} | {value:.2f} | {shown} | {_verdict(None if goal is None else value >= goal)} |"


def _verdict(is_met: bool | None) -> str:
    return "" if is_met is None else "met" if is_met else "MISSED"


def start_line(turns: Turns, side: str) -> str:
    """The start of one of our sides beside its goal; empty where it was not measured."""
    if (seconds := turns.median(START_COLUMN.name, side)) is None:
        return ""
    return f"start of {side}: {seconds:.2f} s; goal {START_GOAL_S:g} s: {_verdict(seconds <= START_GOAL_S)}"


def idle_table(turns: Turns, sides: Iterable[str]) -> str:
    """Markdown: shares of the time in which the worker waited between steps; empty where none was measured."""
    rows = []
    for side in sides:
        for column in COLUMNS:
            share = turns.fact(column.name, side, "idle_share")
            if share is not None and column.name in IDLE_GOALS:
                goal = IDLE_GOALS[column.name]
                rows.append(f"| {side} | {column.name} | {share:.1%} | {goal:.0%} | {_verdict(share <= goal)} |")
    header = ["| worker idle between steps | | share | at most | |", "|---|---|---:|---:|---|"]
    return "\n".join([*header, *rows]) if rows else ""


def served_table(turns: Turns) -> str:
    """Markdown: the served product beside the engine alone; empty where it was not measured."""
    engine = turns.median(SERVED.name, ENGINE_LOADED)
    if engine is None:
        return ""
    rows = [
        f"| {SERVED.name} | {SERVED.unit} | of the engine, clients busy | goal | clients, cores | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name in (ENGINE, ENGINE_LOADED, GRPC, HTTP):
        rate, cores = turns.median(SERVED.name, name), turns.fact(SERVED.name, name, "clients_cores")
        if rate is None:
            continue
        share, goal = rate / engine, OUTPUT_GOAL if name == HTTP else None
        verdict = _verdict(None if goal is None else share >= goal)
        shown = "" if cores is None else f"{cores:.2f}"
        rows.append(f"| {name} | {rate:.0f} | {share:.2f} | {'' if goal is None else goal} | {shown} | {verdict} |")
    return "\n".join(rows)


def write_plot(path: Path, turns: Turns, ours: Sequence[str], peers: Sequence[str]) -> None:
    """Bars of every column that was measured of all sides, peers first."""
    names = [*peers, *ours]
    charts = []
    for column in COLUMNS:
        values = [turns.median(column.name, name) for name in names]
        if all(value is not None for value in values):
            charts.append(Chart(f"{column.name}, {column.unit}", [value or 0.0 for value in values]))
    if charts:
        write_bars(path, names, charts, num_highlighted=len(ours))
