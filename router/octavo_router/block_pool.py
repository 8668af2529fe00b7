"""The blocks of one tier: who is free, who is held how often, who is kept for its content.

    blank --allocate--> held --release--> unsent --end_plan--> sent --begin_plan--> blank, or cached
                         ^                                                          cached --evict--> blank
                         +------------- take, from wherever the content still is ---------+

A block goes back by way of two plans. The plan that tells the worker of a release must not use the block itself, for
what the worker does within one step has no order that we could lean on; the plan behind it may. So a released block is
*unsent* until a plan carries its release, *sent* while that plan is the latest, and from the next plan on it is blank,
or *cached* where its content is worth keeping. Cached blocks are as good as free: evicted when no blank one is left,
least recently released first.

Knows nothing of what is in a block, or of other tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain


class BlockPool:
    """Ids are 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # A stack: the block freed last is the likeliest to be in a processor's cache.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._kept: set[int] = set()
        # Ordered sets: a block may be taken out of the middle, and the order is that of release.
        self._cached: dict[int, None] = {}
        self._unsent: dict[int, None] = {}
        self._sent: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that the plan under construction may use: blank ones, and cached ones once they are evicted."""
        return len(self._blank) + len(self._cached)

    @property
    def num_blank(self) -> int:
        """Blocks that the plan under construction may use as they are."""
        return len(self._blank)

    @property
    def num_unsent(self) -> int:
        """Released blocks whose release no plan has carried yet."""
        return len(self._unsent)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content is kept, those on their way back among them."""
        return len(self._cached) + sum(block_id in self._kept for block_id in chain(self._unsent, self._sent))

    @property
    def num_kept(self) -> int:
        """Blocks whose content is kept, held or not."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return self.num_blocks - len(self._blank) - len(self._cached) - len(self._unsent) - len(self._sent)

    def ref_count(self, block_id: int) -> int:
        """How often a block is held."""
        return self._ref_counts[block_id]

    def is_kept(self, block_id: int) -> bool:
        """Whether the block's content is worth keeping; then nobody may write to it."""
        return block_id in self._kept

    def is_evictable(self, block_id: int) -> bool:
        """Whether the block counts as free though its content is kept."""
        return block_id in self._cached

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes that many blank blocks, each with a reference count of 1. There must be enough."""
        if num_blocks == 0:
            return []
        assert num_blocks <= len(self._blank), f"{num_blocks} blocks asked for, {len(self._blank)} blank"
        block_ids = self._blank[: -num_blocks - 1 : -1]
        del self._blank[-num_blocks:]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def take(self, block_id: int) -> None:
        """Adds a reference to a block that is held, or that has content to share."""
        if self._ref_counts[block_id] == 0:
            place = next(place for place in (self._cached, self._sent, self._unsent) if block_id in place)
            del place[block_id]
        self._ref_counts[block_id] += 1

    def release(self, table: Sequence[int]) -> None:
        """Gives up one reference to each block of a table, the last first, so that tails are evicted before heads.

        Blocks without any reference are on their way back.
        """
        for block_id in reversed(table):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} was released more often than taken"
            if self._ref_counts[block_id] == 0:
                self._unsent[block_id] = None

    def keep(self, block_id: int) -> None:
        """The content of a held block is worth keeping from now on."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is kept, but not held"
        self._kept.add(block_id)

    def drop(self, block_id: int) -> None:
        """The content of a block is not worth keeping any more."""
        self._kept.remove(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._blank.append(block_id)

    @property
    def next_to_evict(self) -> int:
        """The cached block that has not been held for longest. There must be one."""
        return next(iter(self._cached))

    def begin_plan(self) -> None:
        """A plan is being made: blocks whose release the plan before it carried are free."""
        for block_id in self._sent:
            if block_id in self._kept:
                self._cached[block_id] = None
            else:
                self._blank.append(block_id)
        self._sent.clear()

    def end_plan(self) -> None:
        """The plan is made and carries every release so far."""
        self._sent, self._unsent = self._unsent, self._sent
        assert not self._unsent, "a plan was ended that was not begun"

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that each block is in exactly one place and counted by exactly the tables that hold it."""
        holders = Counter(block_id for table in tables for block_id in table)
        idle = Counter([*self._blank, *self._cached, *self._unsent, *self._sent])
        assert not idle or max(idle.values()) == 1, f"blocks are in the pool twice: {idle.most_common(1)}"
        assert not (holders.keys() & idle.keys()), f"blocks are free and held: {sorted(holders.keys() & idle.keys())}"
        assert len(holders) == self.num_used, f"{self.num_used} blocks are used, but tables hold {len(holders)}"
        for block_id, count in enumerate(self._ref_counts):
            assert count == holders[block_id], (
                f"block {block_id} counts {count} references, {holders[block_id]} tables hold it"
            )
        assert self._kept.isdisjoint(self._blank), "a blank block has content to keep"
        assert self._kept.issuperset(self._cached), "a block is cached without content to keep"
