"""Two tiers: tables that grow, fork, move and come back, cached prefixes, and everything at once by random search.

The random search keeps a pretended content in every block, moved as the plans' moves say, so that a missing copy or a
block that is shared and written shows as another content.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo_router.block_manager import BlockManager
from octavo_router.prefix_cache import CachedBlock, Tier


def make_blocks(num_device_blocks: int = 5, num_host_blocks: int = 0) -> BlockManager:
    return BlockManager(block_size=4, num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks)


def next_plan(blocks: BlockManager) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
    """Ends the plan under construction and begins the next; returns its swaps out and in, and its copies."""
    moves = blocks.end_plan()
    blocks.begin_plan()
    out, back, copies = (
        list(zip(columns.source_block_ids, columns.target_block_ids, strict=True))
        for columns in (moves.swap_out, moves.swap_in, moves.copies)
    )
    return out, back, copies


def test_a_table_grows_by_what_its_tokens_need() -> None:
    blocks = make_blocks()
    table: list[int] = []
    assert blocks.extend(table, 1) == [0]
    assert blocks.extend(table, 4) == []
    assert blocks.extend(table, 9) == [1, 2]
    assert table == [0, 1, 2]
    assert blocks.num_missing(table, 13) == 1
    assert blocks.num_missing(table, 2) == 0
    assert blocks.num_tokens_within_free(table) == 20
    blocks.check_integrity([table])


def test_a_fork_shares_full_blocks_and_copies_the_one_it_writes_to() -> None:
    blocks = make_blocks()
    table: list[int] = []
    blocks.extend(table, 10)
    child = blocks.fork(table, 10)
    assert child == [0, 1, 3]
    assert (blocks.device.num_used, blocks.counts.num_copied_blocks) == (4, 1)
    assert [blocks.is_writable(block_id) for block_id in (0, 1, 2, 3)] == [False, False, True, True]
    on_boundary = blocks.fork(table, 8)
    assert on_boundary == [0, 1]
    blocks.check_integrity([table, child, on_boundary])
    assert next_plan(blocks) == ([], [], [(2, 3)])


def test_tables_count_what_their_release_would_free() -> None:
    blocks = make_blocks()
    table: list[int] = []
    blocks.extend(table, 12)
    child = blocks.fork(table, 8)
    assert (blocks.num_freed_by([table]), blocks.num_freed_by([child]), blocks.num_freed_by([table, child])) == (
        1,
        0,
        3,
    )


def test_a_published_block_is_found_and_shared_and_written_by_nobody() -> None:
    blocks = make_blocks()
    table: list[int] = []
    blocks.extend(table, 8)
    assert blocks.publish(table[0], b"a")
    assert not blocks.publish(table[1], b"a"), "another block has that content already"
    assert not blocks.is_writable(table[0])
    found = blocks.cache.match([b"a"], 1)
    assert blocks.num_needed(found) == 0
    assert blocks.take_cached(found) == [0]
    blocks.check_integrity([table, [0]])


def test_an_evicted_block_goes_to_the_host_and_comes_back() -> None:
    blocks = make_blocks(num_device_blocks=2, num_host_blocks=1)
    table: list[int] = []
    blocks.extend(table, 8)
    blocks.publish(0, b"a")
    blocks.publish(1, b"b")
    blocks.release(table)
    next_plan(blocks)
    next_plan(blocks)
    other: list[int] = []
    blocks.extend(other, 4)
    assert other == [1], "the tail goes before the head"
    assert next_plan(blocks) == ([(1, 0)], [], [])
    found = blocks.cache.match([b"a", b"b"], 2)
    assert found == [CachedBlock(Tier.DEVICE, 0), CachedBlock(Tier.HOST, 0)]
    assert (blocks.host.num_used, blocks.host.num_cached) == (0, 1)
    blocks.release(other)
    next_plan(blocks)
    next_plan(blocks)
    assert blocks.num_needed(found) == 2
    restored = blocks.take_cached(found)
    assert restored == [0, 1]
    assert next_plan(blocks) == ([], [(0, 1)], [])
    assert blocks.cache.match([b"a", b"b"], 2) == [CachedBlock(Tier.DEVICE, 0), CachedBlock(Tier.DEVICE, 1)]
    assert (blocks.counts.num_evictions, blocks.counts.num_demotions, blocks.counts.num_swapped_in_blocks) == (1, 1, 1)
    blocks.check_integrity([restored])


def test_without_room_on_the_host_an_evicted_block_is_forgotten() -> None:
    blocks = make_blocks(num_device_blocks=1)
    table: list[int] = []
    blocks.extend(table, 4)
    blocks.publish(0, b"a")
    blocks.release(table)
    next_plan(blocks)
    next_plan(blocks)
    blocks.extend(table, 4)
    assert b"a" not in blocks.cache
    assert next_plan(blocks) == ([], [], [])
    assert (blocks.counts.num_evictions, blocks.counts.num_demotions) == (1, 0)


def test_one_plan_demotes_to_a_host_block_once() -> None:
    blocks = make_blocks(num_device_blocks=3, num_host_blocks=1)
    table: list[int] = []
    blocks.extend(table, 12)
    for block_id in table:
        blocks.publish(block_id, bytes([block_id]))
    blocks.release(table)
    next_plan(blocks)
    next_plan(blocks)
    blocks.extend(table, 12)
    assert next_plan(blocks) == ([(2, 0)], [], [])
    assert blocks.counts.num_demotions == 1


def test_swapping_keeps_what_is_shared_and_takes_the_hash_along() -> None:
    blocks = make_blocks(num_device_blocks=6, num_host_blocks=6)
    first: list[int] = []
    blocks.extend(first, 6)
    second = blocks.fork(first, 6)
    blocks.publish(0, b"a")
    next_plan(blocks)
    host_tables = blocks.swap_out([first, second])
    assert (host_tables, first, second) == ([[0, 1], [0, 2]], [], [])
    assert blocks.cache.match([b"a"], 1) == [CachedBlock(Tier.HOST, 0)]
    blocks.check_integrity([], host_tables)
    assert next_plan(blocks) == ([(0, 0), (1, 1), (2, 2)], [], [])
    next_plan(blocks)
    tables = blocks.swap_in(host_tables)
    assert host_tables == [[], []]
    assert tables[0][0] == tables[1][0]
    assert blocks.cache.match([b"a"], 1) == [CachedBlock(Tier.DEVICE, tables[0][0])]
    blocks.check_integrity(tables, host_tables)
    assert len(next_plan(blocks)[1]) == 3


def test_a_hash_stays_where_others_hold_its_block() -> None:
    blocks = make_blocks(num_device_blocks=6, num_host_blocks=6)
    first: list[int] = []
    blocks.extend(first, 4)
    blocks.publish(0, b"a")
    second = blocks.fork(first, 4)
    (host_table,) = blocks.swap_out([first])
    assert blocks.cache.match([b"a"], 1) == [CachedBlock(Tier.DEVICE, 0)]
    blocks.check_integrity([second], [host_table])


def test_a_flush_forgets_everything_and_frees_what_nobody_holds() -> None:
    blocks = make_blocks(num_device_blocks=3, num_host_blocks=1)
    held: list[int] = []
    blocks.extend(held, 8)
    blocks.publish(0, b"a")
    gone = [held.pop()]
    blocks.publish(gone[0], b"b")
    blocks.release(gone)
    assert blocks.flush() == 1
    assert len(blocks.cache) == 0
    assert blocks.is_writable(0)
    next_plan(blocks)
    next_plan(blocks)
    assert blocks.device.num_blank == 2
    blocks.check_integrity([held])


def test_integrity_sees_a_hash_without_content() -> None:
    blocks = make_blocks()
    table: list[int] = []
    blocks.extend(table, 4)
    blocks.cache.name(b"a", Tier.DEVICE, 0)
    with pytest.raises(AssertionError, match="names a device block not kept"):
        blocks.check_integrity([table])


BLOCK_SIZE = 4
NUM_DEVICE, NUM_HOST = 10, 5


@dataclass
class Line:
    """A sequence of the model: its tokens, all written, and its table on one of the tiers. is_in_plan: the plan under
    construction writes to its blocks; what it writes is there only behind that plan's moves, so nobody else may have it
    yet, and a scheduler does not take it back."""

    tokens: list[int]
    table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    is_swapped: bool = False
    is_in_plan: bool = True

    def hash_of(self, index: int) -> bytes:
        """Stands for the content of a block and all before it."""
        return b"".join(token.to_bytes(4) for token in self.tokens[: (index + 1) * BLOCK_SIZE])


def some_of(lines: list[Line]) -> st.SearchStrategy[list[Line]]:
    """All of them, or a few: together they may share blocks."""
    return st.just(lines) | st.lists(st.sampled_from(lines), min_size=1, max_size=3, unique_by=id)


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences that start, hit, grow, fork, swap, publish and end at random, and plans that come and go, beside a
    model: contents of blocks, which move by the moves of each plan and are written behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_blocks(NUM_DEVICE, NUM_HOST)
        self.blocks.begin_plan()
        self.lines: list[Line] = []
        self.device: dict[int, list[int | None]] = {block_id: [] for block_id in range(NUM_DEVICE)}
        self.host: dict[int, list[int | None]] = {}
        self.writes: list[tuple[int, int, list[int]]] = []
        self.released_now: set[int] = set()
        self.used_now: set[int] = set()
        self.next_token = 0

    @property
    def running(self) -> list[Line]:
        return [line for line in self.lines if not line.is_swapped]

    @property
    def swapped(self) -> list[Line]:
        return [line for line in self.lines if line.is_swapped and not line.is_in_plan]

    @property
    def at_rest(self) -> list[Line]:
        return [line for line in self.running if not line.is_in_plan]

    @rule(num_tokens=st.integers(1, 14), is_known=st.booleans())
    def start(self, num_tokens: int, is_known: bool) -> None:
        line = Line(list(range(num_tokens)) if is_known else [self._token() for _ in range(num_tokens)])
        num_full = (num_tokens - 1) // BLOCK_SIZE
        found = self.blocks.cache.match([line.hash_of(index) for index in range(num_full)], num_full)
        num_needed = self.blocks.num_blocks(num_tokens) - len(found) + self.blocks.num_needed(found)
        if num_needed <= self.blocks.device.num_free:
            line.table = self.blocks.take_cached(found)
            self.lines.append(line)
            self._write(line, len(found) * BLOCK_SIZE)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(1, 6))
    def grow(self, data: st.DataObject, more: int) -> None:
        line = data.draw(st.sampled_from(self.running))
        begin = len(line.tokens)
        if begin + more > self.blocks.num_tokens_within_free(line.table):
            return
        assert begin % BLOCK_SIZE == 0 or self.blocks.is_writable(line.table[begin // BLOCK_SIZE])
        line.tokens += [self._token() for _ in range(more)]
        line.is_in_plan = True
        self._write(line, begin)

    @precondition(lambda self: self.at_rest)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data: st.DataObject, share: float) -> None:
        parent = data.draw(st.sampled_from(self.at_rest))
        num_tokens = max(1, int(share * len(parent.tokens)))
        if self.blocks.device.num_free:
            self.lines.append(Line(parent.tokens[:num_tokens], self.blocks.fork(parent.table, num_tokens)))

    @precondition(lambda self: self.at_rest)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(self.at_rest))
        for index in range(len(line.tokens) // BLOCK_SIZE):
            if self.blocks.cache.hash_of(Tier.DEVICE, line.table[index]) is None:
                self.blocks.publish(line.table[index], line.hash_of(index))

    @precondition(lambda self: any(not line.is_in_plan for line in self.lines))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from([line for line in self.lines if not line.is_in_plan]))
        self.lines = [other for other in self.lines if other is not line]
        if line.is_swapped:
            self.blocks.release_host(line.host_table)
        else:
            self._release([line.table])
            self.blocks.release(line.table)

    @precondition(lambda self: self.at_rest)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        self._swap_out(data.draw(some_of(self.at_rest)))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        self._swap_in(data.draw(some_of(self.swapped)))

    @precondition(lambda self: self.at_rest)
    @rule()
    def swap_everything_out_and_in(self) -> None:
        self._swap_out(self.at_rest)
        self.plan()
        self._swap_in(self.swapped)

    def _swap_out(self, lines: list[Line]) -> None:
        tables = [line.table for line in lines]
        if len({block_id for table in tables for block_id in table}) <= self.blocks.host.num_free:
            self._release(tables)
            for line, host_table in zip(lines, self.blocks.swap_out(tables), strict=True):
                line.host_table, line.is_swapped, line.is_in_plan = host_table, True, True

    def _swap_in(self, lines: list[Line]) -> None:
        if len({block_id for line in lines for block_id in line.host_table}) <= self.blocks.device.num_free:
            for line, table in zip(lines, self.blocks.swap_in([line.host_table for line in lines]), strict=True):
                line.table, line.is_swapped, line.is_in_plan = table, False, True

    @rule()
    def flush(self) -> None:
        self.blocks.flush()
        assert len(self.blocks.cache) == 0

    @rule()
    def plan(self) -> None:
        moves = self.blocks.end_plan()
        for columns, sources, targets in (
            (moves.swap_out, self.device, self.host),
            (moves.swap_in, self.host, self.device),
            (moves.copies, self.device, self.device),
        ):
            assert len(set(columns.target_block_ids)) == len(columns)
            for source, target in zip(columns.source_block_ids, columns.target_block_ids, strict=True):
                targets[target] = list(sources[source])
        assert set(moves.copies.source_block_ids).isdisjoint(moves.copies.target_block_ids)
        targets_now = {*moves.swap_in.target_block_ids, *moves.copies.target_block_ids, *self.used_now}
        assert targets_now.isdisjoint(self.released_now), "a block is freed and used in one plan"
        for block_id, offset, tokens in self.writes:
            content = self.device[block_id][:offset]
            self.device[block_id] = [*content, *[None] * (offset - len(content)), *tokens]
        for line in self.running:
            content = [token for block_id in line.table for token in self.device[block_id]]
            assert content[: len(line.tokens)] == line.tokens
        for line in self.lines:
            line.is_in_plan = False
        self.writes, self.released_now, self.used_now = [], set(), set()
        self.blocks.begin_plan()

    def _token(self) -> int:
        self.next_token += 1
        return 1000 + self.next_token

    def _write(self, line: Line, begin: int) -> None:
        """The line's tokens from `begin` on are written by the plan under construction."""
        self.used_now.update(self.blocks.extend(line.table, len(line.tokens)))
        while begin < len(line.tokens):
            index, offset = divmod(begin, BLOCK_SIZE)
            end = min((index + 1) * BLOCK_SIZE, len(line.tokens))
            self.writes.append((line.table[index], offset, line.tokens[begin:end]))
            begin = end

    def _release(self, tables: list[list[int]]) -> None:
        """Notes what is about to be nobody's."""
        holders = Counter(block_id for table in tables for block_id in table)
        for block_id, count in holders.items():
            if self.blocks.device.ref_count(block_id) == count:
                self.released_now.add(block_id)

    @invariant()
    def holds(self) -> None:
        self.blocks.check_integrity(
            [line.table for line in self.lines], [line.host_table for line in self.lines if line.is_swapped]
        )
        for line in self.running:
            assert 0 <= len(line.table) * BLOCK_SIZE - len(line.tokens) < BLOCK_SIZE


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
