from __future__ import annotations

import pytest
from columns import DECODE, PREFILL, START, Column, Goal, Turn, Turns, compare

GOAL = Goal("ours", "", {"batch 1": 1.5, "batch 8": 1.5}, 1.8)


def turns_of(**values: dict[str, list[float]]) -> Turns:
    """Turns by side and column; the first of each is its warm-up."""
    return Turns(
        [
            Turn(column.replace("_", " "), number, side, value, 40.0)
            for side, columns in values.items()
            for column, results in columns.items()
            for number, value in enumerate(results)
        ]
    )


@pytest.mark.parametrize(
    ("column", "value"),
    [(Column("a", DECODE, 8), 512.0), (Column("a", PREFILL, 1, 2048, 1), 1024.0), (Column("a", START), 2.0)],
)
def test_what_two_seconds_count(column: Column, value: float) -> None:
    assert column.value(2.0) == value


def test_prompts_are_the_same_for_all_and_new_every_round() -> None:
    column = Column("batch 8", DECODE, 8)
    assert column.prompts(1) == column.prompts(1) != column.prompts(2)
    assert [len(prompt) for prompt in column.prompts(1)] == [32] * 8


def test_a_side_is_compared_with_the_best_peer_of_each_column() -> None:
    turns = turns_of(
        ours={"batch_1": [1, 300, 100, 200], "batch_8": [1, 900]},
        slow={"batch_1": [999, 50], "batch_8": [1, 450]},
        fast={"batch_1": [1, 100], "batch_8": [1, 100]},
    )
    found = compare(GOAL, turns, ["slow", "fast"])
    assert found is not None
    assert [(r.column, r.rival, r.value, r.goal) for r in found.ratios] == [
        ("batch 1", "fast", 2.0, 1.5),
        ("batch 8", "slow", 2.0, 1.5),
    ]
    assert found.mean == pytest.approx(2.0)


def test_there_is_no_mean_of_some_columns_and_no_comparison_without_a_rival() -> None:
    turns = turns_of(ours={"batch_1": [1, 200]}, fast={"batch_1": [1, 100]})
    found = compare(GOAL, turns, ["fast"])
    assert found is not None
    assert found.mean is None
    assert compare(GOAL, turns, []) is None
    assert compare(Goal("ours", "absent", {}), turns, ["fast"]) is None


def test_what_was_not_measured_is_none() -> None:
    turns = turns_of(ours={"batch_1": [7]})
    assert turns.median("batch 1", "ours") is None
    assert turns.fact("batch 1", "ours", "idle_share") is None
