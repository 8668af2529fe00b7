"""Blocks: taken on demand, counted, and free again only behind the plan that carries their release."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo_router.block_manager import BlockManager, BlockPool


def test_a_table_grows_by_what_its_tokens_need() -> None:
    blocks = BlockManager(block_size=4, num_device_blocks=5)
    table: list[int] = []
    assert blocks.extend(table, 1) == [0]
    assert blocks.extend(table, 4) == []
    assert blocks.extend(table, 9) == [1, 2]
    assert table == [0, 1, 2]
    assert blocks.num_missing(table, 13) == 1
    assert blocks.num_missing(table, 2) == 0
    assert blocks.num_tokens_within_free(table) == 20
    blocks.check_integrity([table])


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


def test_misuse_is_our_own_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release(taken)


def test_integrity_sees_lost_and_shared_blocks() -> None:
    blocks = BlockManager(block_size=4, num_device_blocks=4)
    table: list[int] = []
    blocks.extend(table, 8)
    with pytest.raises(AssertionError, match="2 blocks are used, but tables hold 1"):
        blocks.check_integrity([table[:1]])
    with pytest.raises(AssertionError, match="counts 1 references, 2 tables"):
        blocks.check_integrity([table, table])
    with pytest.raises(AssertionError, match="free and held"):
        blocks.check_integrity([[*table, 3]])


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences that grow and end at random, and plans that come and go, beside a model that is a set of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(block_size=4, num_device_blocks=12)
        self.tables: list[list[int]] = []
        self.num_tokens: list[int] = []
        self.untouchable: set[int] = set()
        self.released: set[int] = set()

    @rule(num_tokens=st.integers(1, 20))
    def start(self, num_tokens: int) -> None:
        if self.blocks.num_blocks(num_tokens) <= self.blocks.device.num_free:
            self.tables.append([])
            self.num_tokens.append(0)
            self._grow(len(self.tables) - 1, num_tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(1, 9))
    def grow(self, data: st.DataObject, more: int) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        total = self.num_tokens[index] + more
        if total <= self.blocks.num_tokens_within_free(self.tables[index]):
            self._grow(index, total)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.released.update(self.tables[index])
        self.blocks.release(self.tables.pop(index))
        self.num_tokens.pop(index)

    @rule()
    def plan(self) -> None:
        self.blocks.device.begin_plan()
        self.blocks.device.end_plan()
        self.untouchable, self.released = self.released, set()

    def _grow(self, index: int, num_tokens: int) -> None:
        taken = self.blocks.extend(self.tables[index], num_tokens)
        self.num_tokens[index] = num_tokens
        assert not set(taken) & (self.untouchable | self.released)

    @invariant()
    def holds(self) -> None:
        self.blocks.check_integrity(self.tables)
        for table, num_tokens in zip(self.tables, self.num_tokens, strict=True):
            assert 0 <= len(table) * 4 - num_tokens < 4


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
