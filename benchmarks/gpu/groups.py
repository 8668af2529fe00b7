"""Which parts there are, in which order and how many processes they run, and what share of the time they get."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

SHARDED = ("equality", "dtypes")
"""Parts in which nothing is timed: their cases, which mostly wait for a compiler, are spread over several processes."""


@dataclass(frozen=True)
class Group:
    """Parts that run at the same time or one after the other; what loses the device in one group leaves the others
    theirs. weight: of its time, among those that are still to run; what a group leaves is the others'."""

    name: str
    parts: tuple[str, ...]
    weight: float


@dataclass(frozen=True)
class Job:
    """Parts that one process measures one after the other: every `of`-th case from number `shard` on."""

    name: str
    parts: tuple[str, ...]
    shard: int = 0
    of: int = 1


# What the goals are about comes before what only completes the picture. Kernels are compiled, for all groups behind,
# beside the first comparison, where nothing is timed.
GROUPS = (
    Group("equality", ("equality", "compile"), 4.0),
    Group("model", ("decode", "prefill", "swap", "load"), 5.0),
    Group("kernels", ("kernels",), 2.5),
    Group("peer", ("peer",), 3.0),
    Group("other dtypes", ("dtypes",), 1.5),
)
PART_NAMES = tuple(part for group in GROUPS for part in group.parts)


def chosen_groups(parts: Container[str]) -> list[Group]:
    """The groups with only these parts, without those that then have none."""
    groups = [Group(group.name, tuple(p for p in group.parts if p in parts), group.weight) for group in GROUPS]
    return [group for group in groups if group.parts]


def jobs_of(group: Group, num_processes: int) -> list[Job]:
    """The group's processes, which run at the same time. num_processes: for each sharded part."""
    jobs = [
        Job(
            f"{part}, process {shard + 1} of {num_processes}" if num_processes > 1 else part,
            (part,),
            shard,
            num_processes,
        )
        for part in group.parts
        if part in SHARDED
        for shard in range(num_processes)
    ]
    rest = tuple(part for part in group.parts if part not in SHARDED)
    return [*jobs, Job(", ".join(rest), rest)] if rest else jobs


def limit_s(groups: list[Group], left_s: float) -> float:
    """Seconds for the first of the groups that are still to run."""
    return left_s * groups[0].weight / sum(group.weight for group in groups)
