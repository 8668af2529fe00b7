"""Rows, their goals and the tables of them."""

from __future__ import annotations

import pytest
from gpu.rows import ORACLE, Row, goals, table


@pytest.mark.parametrize(
    ("row", "goal", "is_met"),
    [
        (Row("a", 1.0, "s"), "", None),
        (Row("a", 1.0, "s", 0.85, at_least=0.85), "0.85 or more", True),
        (Row("a", 1.0, "s", 0.849, at_least=0.85), "0.85 or more", False),
        (Row("a", 1.0, "s", 1.25, at_most=1.25), "1.25 or less", True),
        (Row("a", 1.0, "s", 1.26, at_most=1.25), "1.25 or less", False),
        (Row("a", 1.0, "s", None, at_least=5.0), "5 or more", None),
        (Row("a", 0.0, "", 0.0, at_most=0.0), "0 or less", True),
        (Row("a", 0.0, "", 1e-9, at_most=0.0), "0 or less", False),
    ],
)
def test_whether_a_goal_is_met(row: Row, goal: str, is_met: bool | None) -> None:
    assert (row.goal, row.is_met) == (goal, is_met)


def test_tables() -> None:
    rows = [
        Row("copy", 4321.0, "GB/s"),
        Row("step", 3.5, "ms", 1.3, "times its floor", at_most=1.25),
        Row("swap", 50.0, "GB/s", 0.95, "of a copy", at_least=0.9),
        Row("norm: equal", 0.0, "", 0.0, ORACLE, at_most=0.02),
        Row("rope: NOT EQUAL", 1.0, "", 1.0, ORACLE, at_most=0.02),
    ]
    assert "| copy            | 4,321 GB/s |       |                 |              |" in table(rows)
    assert goals(rows).splitlines()[2:] == [
        "| step | 3.5 ms   | 1.3   | 1.25 or less | MISSED |",
        "| swap | 50 GB/s  | 0.95  | 0.9 or more  | met    |",
        "",
        "equal to the oracle: 1 of 2 compared",
    ]
