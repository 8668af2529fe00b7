"""One tier's blocks: free again only behind the plan that carries their release, and kept for their content."""

from __future__ import annotations

import pytest

from octavo_router.block_pool import BlockPool


def plan(pool: BlockPool) -> None:
    pool.begin_plan()
    pool.end_plan()


def test_a_released_block_is_free_two_plans_later() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    pool.release(taken)
    assert (pool.num_free, pool.num_unsent, pool.num_used) == (1, 2, 0)
    pool.begin_plan()
    assert pool.num_free == 1, "the plan that carries the release must not use the blocks"
    pool.end_plan()
    assert (pool.num_free, pool.num_unsent) == (1, 0)
    pool.begin_plan()
    assert pool.num_free == 3


def test_a_plan_that_was_begun_and_not_made_frees_nothing_early() -> None:
    pool = BlockPool(2)
    pool.release(pool.allocate(2))
    for _ in range(3):
        pool.begin_plan()
    assert (pool.num_free, pool.num_unsent) == (0, 2)


def test_a_block_is_held_until_its_last_reference_is_released() -> None:
    pool = BlockPool(2)
    taken = pool.allocate(1)
    pool.take(taken[0])
    pool.release(taken)
    assert (pool.ref_count(taken[0]), pool.num_used) == (1, 1)
    pool.release(taken)
    assert (pool.ref_count(taken[0]), pool.num_used) == (0, 0)


def test_a_kept_block_is_free_and_cached_and_can_be_taken_back_from_anywhere() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.keep(block_id)
    for num_plans in range(3):
        pool.release([block_id])
        for _ in range(num_plans):
            plan(pool)
        pool.begin_plan()
        assert (pool.num_cached, pool.num_used) == (1, 0)
        assert pool.is_evictable(block_id) == (num_plans > 0)
        pool.take(block_id)
        assert (pool.num_cached, pool.num_used, pool.num_free) == (0, 1, 1)
        pool.check_integrity([[block_id]])


def test_tails_are_evicted_before_heads_and_the_least_recently_released_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for block_id in (*first, *second):
        pool.keep(block_id)
    pool.release(second)
    plan(pool)
    pool.release(first)
    plan(pool)
    pool.begin_plan()
    order = []
    while pool.num_cached:
        order.append(pool.next_to_evict)
        pool.drop(order[-1])
    assert order == [second[1], second[0], first[1], first[0]]
    assert pool.num_blank == 4


def test_content_that_is_dropped_on_the_way_back_leaves_a_blank_block() -> None:
    pool = BlockPool(1)
    taken = pool.allocate(1)
    pool.keep(taken[0])
    pool.release(taken)
    pool.drop(taken[0])
    plan(pool)
    pool.begin_plan()
    assert (pool.num_blank, pool.num_cached) == (1, 0)
    pool.check_integrity([])


def test_misuse_is_our_own_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 blank"):
        pool.allocate(3)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release(taken)
    with pytest.raises(AssertionError, match="kept, but not held"):
        pool.keep(taken[0])


def test_integrity_sees_lost_and_shared_blocks() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="2 blocks are used, but tables hold 1"):
        pool.check_integrity([table[:1]])
    with pytest.raises(AssertionError, match="counts 1 references, 2 tables"):
        pool.check_integrity([table, table])
    with pytest.raises(AssertionError, match="free and held"):
        pool.check_integrity([[*table, 3]])
