"""Would the simulator notice? The core is broken on purpose, one way at a time, and a few seeds have to find it.

Each break is tried twice: with the scheduler's own `check_integrity`, and with that switched off, so that the checks of
the simulation are known to suffice alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo_router import prefix_cache, suspects
from octavo_router.batch import Batch
from octavo_router.block_manager import BlockManager
from octavo_router.block_pool import BlockPool
from octavo_router.fairness import FairQueue
from octavo_router.plan import BlockMoves, Moves, StepPlan, StepResult
from octavo_router.prefix_cache import Tier, chained_hash
from octavo_router.prefix_sharing import PrefixSharing
from octavo_router.queues import WaitingQueue
from octavo_router.results import Event
from octavo_router.scheduler import Scheduler
from octavo_router.sequence import Sequence, SequenceStatus
from octavo_router.suspects import Suspects
from tests.simulator import invariants
from tests.simulator.run import Task, simulate

SEEDS = range(12)

Patch = Callable[[pytest.MonkeyPatch], None]


def copy_on_write_shares(patch: pytest.MonkeyPatch) -> None:
    """A fork shares the block that it is going to write to."""

    def fork(blocks: BlockManager, table: list[int], num_tokens: int, **others: object) -> list[int]:
        return blocks.share(table[: blocks.num_blocks(num_tokens)])

    patch.setattr(BlockManager, "fork", fork)


def copy_on_write_does_not_copy(patch: pytest.MonkeyPatch) -> None:
    """A fork has a block of its own, and what was in the other one is not copied."""
    original = BlockManager.end_plan

    def end_plan(blocks: BlockManager) -> Moves:
        moves = original(blocks)
        moves.copies = BlockMoves()
        return moves

    patch.setattr(BlockManager, "end_plan", end_plan)


def last_block_is_never_released(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.release

    def release(blocks: BlockManager, table: list[int]) -> None:
        if len(table) > 1:
            table.pop()
        original(blocks, table)

    patch.setattr(BlockManager, "release", release)


def worker_is_not_told_of_a_release(patch: pytest.MonkeyPatch) -> None:
    """Of a sequence that ends while it runs. Its blocks come back, but the worker keeps it."""
    original = Batch.leave

    def leave(batch: Batch, sequence: Sequence) -> None:
        original(batch, sequence)
        if sequence.sequence_id in batch.releases and len(batch.releases) > 1:
            batch.releases.remove(sequence.sequence_id)

    patch.setattr(Batch, "leave", leave)


def hash_is_published_when_planned(patch: pytest.MonkeyPatch) -> None:
    """Others find a block as soon as a plan is going to compute it."""
    original = Scheduler.plan

    def plan(scheduler: Scheduler, now: float) -> StepPlan | None:
        made = original(scheduler, now)
        for sequence in scheduler.running:
            num_computed = sequence.num_computed
            sequence.num_computed = min(sequence.num_planned, sequence.num_tokens - sequence.num_in_flight)
            scheduler.batch.prefixes.publish(sequence)
            sequence.num_computed = num_computed
        return made

    patch.setattr(Scheduler, "plan", plan)


def result_of_another_session_is_taken_in(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.apply

    def apply(scheduler: Scheduler, result: StepResult) -> list[Event]:
        return original(scheduler, replace(result, epoch=scheduler.epoch or 0))

    patch.setattr(Scheduler, "apply", apply)


def result_is_taken_in_twice(patch: pytest.MonkeyPatch) -> None:
    """A result that was answered already passes for the one that is due."""
    original = Scheduler.apply

    def apply(scheduler: Scheduler, result: StepResult) -> list[Event]:
        if result.epoch == scheduler.epoch and scheduler.oldest_in_flight is not None:
            result = replace(result, step_seq=scheduler.last_step_seq + 1)
        return original(scheduler, result)

    patch.setattr(Scheduler, "apply", apply)


def block_is_freed_and_used_in_one_plan(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.begin_plan

    def begin_plan(pool: BlockPool) -> None:
        pool._sent.update(pool._unsent)
        pool._unsent.clear()
        original(pool)

    patch.setattr(BlockPool, "begin_plan", begin_plan)


def token_past_the_end_is_hashed(patch: pytest.MonkeyPatch) -> None:
    """A sequence that ends publishes all that was planned for it, the token that lookahead sampled too many with it."""
    original = Batch.leave

    def leave(batch: Batch, sequence: Sequence) -> None:
        blocks = batch.blocks
        if sequence.status is SequenceStatus.RUNNING and sequence.num_in_flight and blocks.enable_prefix_caching:
            num_full = sequence.num_planned // blocks.block_size
            num_known = sequence.num_tokens - sequence.num_in_flight
            if num_full * blocks.block_size > num_known > (num_full - 1) * blocks.block_size and num_full > 1:
                begin = (num_full - 1) * blocks.block_size
                tokens = [*sequence.tokens(begin, num_known), *[5] * (num_full * blocks.block_size - num_known)]
                parent = batch.prefixes.block_hashes(sequence, num_full - 1)[num_full - 2]
                blocks.publish(sequence.block_table[num_full - 1], chained_hash(parent, tokens))
        original(batch, sequence)

    patch.setattr(Batch, "leave", leave)


def failed_step_is_published(patch: pytest.MonkeyPatch) -> None:
    """Errors count for nothing until everything of the result was published."""
    original = Scheduler.apply

    def apply(scheduler: Scheduler, result: StepResult) -> list[Event]:
        plan = scheduler.oldest_in_flight
        is_due = result.epoch == scheduler.epoch and plan is not None and plan.step_seq == result.step_seq
        if is_due and result.errors and plan is not None:
            for sequence, num_computed in plan.computed:
                if sequence.is_live:
                    sequence.num_computed = num_computed
                    scheduler.batch.prefixes.publish(sequence)
        return original(scheduler, result)

    patch.setattr(Scheduler, "apply", apply)


def salt_is_left_out_of_the_hash(patch: pytest.MonkeyPatch) -> None:
    def root_hash(*, model_digest: str, adapter: str, cache_salt: str) -> bytes:
        return prefix_cache.root_hash(model_digest=model_digest, adapter=adapter, cache_salt="")

    # The checks ask the core what a hash is, so they are told the same.
    patch.setattr("octavo_router.prefix_sharing.root_hash", root_hash)
    patch.setattr(invariants, "root_hash", root_hash)


def parent_is_left_out_of_the_hash(patch: pytest.MonkeyPatch) -> None:
    def hash_alone(parent: bytes, token_ids: list[int]) -> bytes:
        return chained_hash(b"", token_ids)

    patch.setattr("octavo_router.prefix_sharing.chained_hash", hash_alone)
    patch.setattr(invariants, "chained_hash", hash_alone)


def demotion_moves_nothing(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.end_plan

    def end_plan(blocks: BlockManager) -> Moves:
        moves = original(blocks)
        moves.swap_out = BlockMoves()
        return moves

    patch.setattr(BlockManager, "end_plan", end_plan)


def eviction_leaves_the_hash(patch: pytest.MonkeyPatch) -> None:
    """A block is used again, and its old hash still finds it."""
    original = BlockManager._evict

    def evict(blocks: BlockManager) -> None:
        block_id = blocks.device.next_to_evict
        block_hash = blocks.cache.hash_of(Tier.DEVICE, block_id)
        original(blocks)
        if block_hash is not None and block_hash not in blocks.cache:
            blocks.cache.name(block_hash, Tier.DEVICE, block_id)

    patch.setattr(BlockManager, "_evict", evict)


def nobody_is_woken(patch: pytest.MonkeyPatch) -> None:
    """Who waits for what another one computes waits for ever."""
    patch.setattr(WaitingQueue, "wake", lambda queue, key: None)


def what_is_being_computed_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """Everybody computes what is not cached yet, at the same time."""
    patch.setattr(PrefixSharing, "announce", lambda sharing, sequence: None)


def turns_go_to_another_tenant(patch: pytest.MonkeyPatch) -> None:
    """Where there are several, somebody else than the one who was served least goes first."""
    original = FairQueue._first_of

    def first_of(queue: FairQueue, level: Any) -> Sequence | None:
        first = original(queue, level)
        heads = [account.heap[0][2] for account in level.accounts.values() if account.heap]
        others = [head for head in heads if queue._is_standing(head) and first and head.group is not first.group]
        return max(others, key=lambda head: head.group.account.num_served, default=first)

    patch.setattr(FairQueue, "_first_of", first_of)


def equals_give_way(patch: pytest.MonkeyPatch) -> None:
    """An arrival takes the place of a request of its own priority, which takes it back, and so on."""
    patch.setattr(Sequence, "priority", property(lambda sequence: 9 - (sequence.status is SequenceStatus.WAITING)))


def everyone_in_flight_is_blamed(patch: pytest.MonkeyPatch) -> None:
    """Whoever was there three times did it, alone or not."""
    patch.setattr(suspects, "LEAST_DEATHS_ALONE", 0)


def nobody_is_blamed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspects, "_is_convicted", lambda self, suspicion: False)


MUTATIONS: dict[Patch, str] = {
    turns_go_to_another_tenant: "passes one whose tenant was served less",
    equals_give_way: "gave way",
    everyone_in_flight_is_blamed: "is blamed, though",
    nobody_is_blamed: "killed the worker 9 times",
    copy_on_write_shares: "shared|is written by|two sequences|holds something else|in the step that writes it",
    copy_on_write_does_not_copy: "which holds nothing there|which holds something else",
    last_block_is_never_released: "count as used|blocks are used|shared and would be written to",
    worker_is_not_told_of_a_release: "the worker still holds sequences",
    hash_is_published_when_planned: "a hash names it|which holds something else|in the step that writes it",
    result_of_another_session_is_taken_in: "is due|was void|not as planned|right is",
    result_is_taken_in_twice: "does not fit was taken in|was void|not as planned|right is",
    block_is_freed_and_used_in_one_plan: "is freed and used in plan",
    token_past_the_end_is_hashed: "no request has such tokens",
    failed_step_is_published: "which holds something else",
    salt_is_left_out_of_the_hash: "one hash names two contents, or content of two salts|another hash than its content",
    parent_is_left_out_of_the_hash: "one hash names two contents|another hash than its content",
    demotion_moves_nothing: "which holds something else|which holds nothing there",
    eviction_leaves_the_hash: "a hash names",
    what_is_being_computed_is_not_awaited: "one block is computed by",
    nobody_is_woken: "nothing is planned|waits for what nobody computes",
}
"""Each with what may give it away."""


@pytest.mark.parametrize("with_own_checks", [True, False], ids=["own checks", "simulation alone"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_core_is_found_out(mutation: Patch, with_own_checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    if not with_own_checks:
        monkeypatch.setattr(Scheduler, "check_integrity", lambda scheduler: None)
    for seed in SEEDS:
        outcome = simulate(Task(seed))
        if outcome.error is not None:
            assert re.search(MUTATIONS[mutation], outcome.error.splitlines()[-1]), outcome.error
            return
    pytest.fail(f"{len(SEEDS)} seeds ran through")
