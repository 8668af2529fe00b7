"""The order of the groups, their processes, and how the time is shared out."""

from __future__ import annotations

from gpu.groups import GROUPS, Job, chosen_groups, jobs_of, limit_s


def test_goals_come_before_what_only_completes_the_picture() -> None:
    names = [group.name for group in GROUPS]
    assert names == ["equality", "model", "kernels", "peer", "other dtypes"]


def test_comparisons_are_spread_over_processes_and_what_is_timed_is_alone() -> None:
    equality, model = GROUPS[:2]
    assert jobs_of(equality, 2) == [
        Job("equality, process 1 of 2", ("equality",), 0, 2),
        Job("equality, process 2 of 2", ("equality",), 1, 2),
        Job("compile", ("compile",)),
    ]
    assert jobs_of(model, 8) == [Job("decode, prefill, swap, load", ("decode", "prefill", "swap", "load"))]


def test_only_some_parts() -> None:
    assert [(group.name, group.parts) for group in chosen_groups(["load", "swap", "equality"])] == [
        ("equality", ("equality",)),
        ("model", ("swap", "load")),
    ]


def test_the_time_that_is_left_is_shared_by_those_that_are_left() -> None:
    assert limit_s(list(GROUPS), 500.0) == 125.0
    assert limit_s(list(GROUPS[-1:]), 120.0) == 120.0
