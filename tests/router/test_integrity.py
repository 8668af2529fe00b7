"""The invariants find what they are there to find: each fault is made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo_router.prefix_cache import Tier
from octavo_router.scheduler import Scheduler
from octavo_router.sequence import Sequence
from tests.router.harness import Harness, make_limits, make_request


def share_a_written_block(scheduler: Scheduler, first: Sequence, second: Sequence) -> None:
    written = second.block_table.pop()
    scheduler.blocks.release([written])
    second.block_table.extend(scheduler.blocks.share(first.block_table[-1:]))


def lose_a_block(scheduler: Scheduler, first: Sequence, second: Sequence) -> None:
    first.block_table.pop()


def publish_too_early(scheduler: Scheduler, first: Sequence, second: Sequence) -> None:
    first.num_computed = 0


def publish_what_is_written(scheduler: Scheduler, first: Sequence, second: Sequence) -> None:
    scheduler.blocks.publish(first.block_table[-1], b"x")


def keep_what_is_written(scheduler: Scheduler, first: Sequence, second: Sequence) -> None:
    scheduler.blocks.device.keep(first.block_table[-1])


def publish_by_a_wrong_hash(scheduler: Scheduler, first: Sequence, second: Sequence) -> None:
    scheduler.blocks.cache.forget(Tier.DEVICE, first.block_table[0])
    scheduler.blocks.cache.name(b"x", Tier.DEVICE, first.block_table[0])


def forget_a_plan(scheduler: Scheduler, first: Sequence, second: Sequence) -> None:
    scheduler.in_flight[0].computed.clear()


def compute_for_nobody(scheduler: Scheduler, first: Sequence, second: Sequence) -> None:
    scheduler.blocks.cache.computing[b"x"] = 99


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (share_a_written_block, "writable by 2 sequences"),
        (lose_a_block, "tables hold"),
        (publish_too_early, "published too early"),
        (publish_what_is_written, "cached block 1 is writable"),
        (keep_what_is_written, "kept without a hash"),
        (publish_by_a_wrong_hash, "another hash than its content"),
        (forget_a_plan, "plans in flight were miscounted"),
        (compute_for_nobody, "does not run"),
    ],
)
def test_a_fault_is_found(fault: Callable[[Scheduler, Sequence, Sequence], None], message: str) -> None:
    harness = Harness(make_limits())
    first = harness.add(make_request("A", num_prompt=6, max_tokens=30)).sequences[0]
    second = harness.add(make_request("B", num_prompt=6, max_tokens=30)).sequences[0]
    harness.step()
    fault(harness.scheduler, first, second)
    with pytest.raises(AssertionError, match=message):
        harness.scheduler.check_integrity()
