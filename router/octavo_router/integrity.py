"""What must hold of a scheduler between any two calls. Costs O(everything): for tests and for looking into a fault."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from octavo_router.prefix_cache import Tier, chained_hash, root_hash
from octavo_router.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from octavo_router.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Asserts every invariant."""
    _check_memory(scheduler)
    _check_running(scheduler)
    _check_waiting(scheduler)
    _check_names(scheduler)
    _check_counts(scheduler)


def _check_memory(scheduler: Scheduler) -> None:
    """On each tier used + cached + blank + on the way = total, references are counted, and nobody writes to what
    another one reads."""
    scheduler.blocks.check_integrity(
        [sequence.block_table for sequence in scheduler.running],
        [sequence.host_table for sequence in scheduler.waiting],
    )
    block_size = scheduler.blocks.block_size
    assert not scheduler.blocks.moves, "moves were left out of a plan"
    holders = Counter(block_id for sequence in scheduler.running for block_id in sequence.block_table)
    for sequence in scheduler.running:
        for index, block_id in enumerate(sequence.block_table):
            if (index + 1) * block_size <= sequence.num_planned:
                continue
            if _is_about_to_be_divided(sequence):
                continue
            assert holders[block_id] == 1, f"block {block_id} is writable by {holders[block_id]} sequences"
            assert not scheduler.blocks.device.is_kept(block_id), f"cached block {block_id} is writable"


def _is_about_to_be_divided(sequence: Sequence) -> bool:
    """Whether a fork comes before the sequence's next write."""
    return sequence.group.beams is not None and sequence.group.beams.step is not None


def _check_running(scheduler: Scheduler) -> None:
    sampled = Counter(
        sequence.sequence_id
        for plan in scheduler.in_flight
        for sequence in plan.sampled
        if sequence.group.beams is None
    )
    planned = Counter(sequence.sequence_id for plan in scheduler.in_flight for sequence, _ in plan.computed)
    for sequence in scheduler.running:
        assert sequence.status is SequenceStatus.RUNNING
        assert not sequence.host_table
        assert len(sequence.block_table) == scheduler.blocks.num_blocks(sequence.num_planned), "a table does not fit"
        may_rest = sequence.group.beams is not None or sequence.group.is_prompt_only
        assert 0 < sequence.num_planned < sequence.num_tokens + may_rest, "everything is planned, or nothing"
        assert sequence.num_in_flight == sampled[sequence.sequence_id], "tokens in flight were miscounted"
        assert sequence.num_plans == planned[sequence.sequence_id], "plans in flight were miscounted"
        assert sequence.num_computed <= sequence.num_planned
        assert sequence.num_plans or sequence.num_computed == sequence.num_planned
        assert len(sequence.output_token_ids) + sequence.num_in_flight <= sequence.group.request.stopping.max_tokens


def _check_waiting(scheduler: Scheduler) -> None:
    for sequence in scheduler.waiting:
        assert not sequence.block_table
        assert sequence.num_plans == sequence.num_in_flight == 0
        if sequence.status is SequenceStatus.SWAPPED:
            assert len(sequence.host_table) == scheduler.blocks.num_blocks(sequence.num_planned)
            assert 0 < sequence.num_planned == sequence.num_computed
        else:
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            assert not sequence.host_table
            assert sequence.num_planned == sequence.num_computed == 0
    if not len(scheduler.running):
        assert scheduler.waiting.num_parked == 0, "somebody waits for what nobody computes"


def _check_names(scheduler: Scheduler) -> None:
    """A hash names no block but one whose content is computed and accepted, and is what the hash says."""
    cache, block_size = scheduler.blocks.cache, scheduler.blocks.block_size
    running = {sequence.sequence_id for sequence in scheduler.running}
    assert running.issuperset(cache.computing.values()), "somebody computes a hash and does not run"
    for sequence in [*scheduler.running, *scheduler.waiting]:
        tier, table = Tier.DEVICE, sequence.block_table
        if sequence.status is SequenceStatus.SWAPPED:
            tier, table = Tier.HOST, sequence.host_table
        parent = root_hash(
            model_digest=scheduler.limits.model_digest, adapter="", cache_salt=sequence.group.request.cache_salt
        )
        num_known = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        for index, block_id in enumerate(table):
            name = cache.hash_of(tier, block_id)
            if (index + 1) * block_size > num_known:
                assert name is None, f"{tier.value} block {block_id} has a hash and is not full"
                break
            parent = chained_hash(parent, sequence.tokens(index * block_size, (index + 1) * block_size))
            assert name in (None, parent), f"{tier.value} block {block_id} has another hash than its content"
            if name is not None:
                assert (index + 1) * block_size <= sequence.num_computed, f"block {block_id} was published too early"


def _check_counts(scheduler: Scheduler) -> None:
    members = [*scheduler.running, *scheduler.waiting]
    groups = {sequence.group for sequence in members}
    unstarted = [group for group in groups if group.started_at is None]
    assert len({sequence.sequence_id for sequence in members}) == len(members)
    for group in groups:
        assert sum(sequence.is_live for sequence in group.sequences) == group.num_unfinished
        assert len(group.running) == group.num_running
    assert sum(group.num_unfinished for group in groups) == len(members)
    assert len(groups) == scheduler.num_requests
    live = Counter(group.account for group in groups)
    assert all(account is not None and account.num_live == count for account, count in live.items())
    assert all(sequence.group.is_admitted for sequence in scheduler.running)
    assert scheduler.waiting.only is None or scheduler.waiting.only in groups, "all wait for a request that has ended"
    assert len(unstarted) == scheduler.num_waiting_requests
    assert sum(len(group.request.prompt_token_ids) for group in unstarted) == scheduler.num_waiting_prompt_tokens
    assert sum(sequence.was_preempted for sequence in scheduler.waiting) == scheduler.waiting.num_preempted
    assert len(scheduler.running) <= scheduler.limits.max_num_running
    assert len(scheduler.in_flight) <= scheduler.limits.max_plans_in_flight
