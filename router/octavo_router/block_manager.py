"""Who holds which KV block: allocation on demand, reference counts, and the way back into the pool.

    free --allocate--> held --release--> unsent --end_plan--> sent --begin_plan--> free

A block goes back by way of two plans. The plan that tells the worker of a release must not use the block itself, for
what the worker does within one step has no order that we could lean on; the plan behind it may. So a released block is
*unsent* until a plan carries its release, *sent* while that plan is the latest, and free from the next plan on.

Knows nothing of sequences but their block tables, and nothing of tokens but their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """The blocks of one tier. Ids are 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = list(
            range(num_blocks - 1, -1, -1)
        )  # a stack: the block freed last is the likeliest to be in a cache
        self._unsent: list[int] = []
        self._sent: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that the plan under construction may use."""
        return len(self._free)

    @property
    def num_unsent(self) -> int:
        """Released blocks whose release no plan has carried yet."""
        return len(self._unsent)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - len(self._free) - len(self._unsent) - len(self._sent)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes that many free blocks, each with a reference count of 1. There must be enough."""
        if num_blocks == 0:
            return []
        assert num_blocks <= len(self._free), f"{num_blocks} blocks asked for, {len(self._free)} free"
        block_ids = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Gives up one reference to each block. Blocks without any are on their way back."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} was released more often than taken"
            if self._ref_counts[block_id] == 0:
                self._unsent.append(block_id)

    def begin_plan(self) -> None:
        """A plan is being made: blocks whose release the plan before it carried are free."""
        self._free.extend(reversed(self._sent))
        self._sent.clear()

    def end_plan(self) -> None:
        """The plan is made and carries every release so far."""
        self._sent, self._unsent = self._unsent, self._sent
        assert not self._unsent, "a plan was ended that was not begun"

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that each block is in exactly one place and counted by exactly the tables that hold it."""
        holders = Counter(block_id for table in tables for block_id in table)
        idle = Counter([*self._free, *self._unsent, *self._sent])
        assert not idle or max(idle.values()) == 1, f"blocks are in the pool twice: {idle.most_common(1)}"
        assert not (holders.keys() & idle.keys()), f"blocks are free and held: {sorted(holders.keys() & idle.keys())}"
        assert len(holders) == self.num_used, f"{self.num_used} blocks are used, but tables hold {len(holders)}"
        for block_id, count in enumerate(self._ref_counts):
            assert count == holders[block_id], (
                f"block {block_id} counts {count} references, {holders[block_id]} tables hold it"
            )


class BlockManager:
    """A worker's KV memory: the pool of its device and the arithmetic of block tables."""

    def __init__(self, *, block_size: int, num_device_blocks: int) -> None:
        self.block_size = block_size
        self.device = BlockPool(num_device_blocks)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, table: Sequence[int], num_tokens: int) -> int:
        """Blocks that a table lacks to hold so many tokens."""
        return max(0, self.num_blocks(num_tokens) - len(table))

    def num_tokens_within_free(self, table: Sequence[int]) -> int:
        """Tokens that a table could hold with every free block added to it."""
        return (len(table) + self.device.num_free) * self.block_size

    def extend(self, table: list[int], num_tokens: int) -> list[int]:
        """Appends free blocks to a table until it holds so many tokens; returns the appended ids."""
        block_ids = self.device.allocate(self.num_missing(table, num_tokens))
        table += block_ids
        return block_ids

    def release(self, table: list[int]) -> None:
        """Gives up a table's blocks and empties it."""
        self.device.release(table)
        table.clear()

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Asserts that used + free + on the way back = total, and that no block has two writers."""
        self.device.check_integrity(tables)
        shared = [block_id for block_id, n in Counter(b for table in tables for b in table).items() if n > 1]
        assert not shared, f"blocks are writable by two sequences: {shared}"
