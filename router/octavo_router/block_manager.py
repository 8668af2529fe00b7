"""A worker's KV memory: two tiers of blocks, shared by reference counts, and the moves between them.

    device:  tables of running sequences, cached prefixes        written by forward passes
    host:    tables of swapped-out sequences, demoted prefixes   written by moves alone

Whatever a plan needs done to the memory before its forward pass collects here, in `moves`, and leaves with the plan:
swaps out, then swaps in, then copies. A block that is shared or cached is never written: a fork copies the block that
it is going to write to.

Knows nothing of sequences but their block tables, and nothing of tokens but their number and their hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from octavo_router.block_pool import BlockPool
from octavo_router.counts import Counts
from octavo_router.plan import Moves
from octavo_router.prefix_cache import CachedBlock, PrefixCache, Tier


class BlockManager:
    """The pools of one session's worker. enable_prefix_caching: whether blocks are found again by their content."""

    def __init__(
        self,
        *,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        counts: Counts | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.device = BlockPool(num_device_blocks)
        self.host = BlockPool(num_host_blocks)
        self.cache = PrefixCache()
        self.moves = Moves()
        self.counts = counts if counts is not None else Counts()

    # Plans

    def begin_plan(self) -> None:
        """A plan is being made."""
        self.device.begin_plan()
        self.host.begin_plan()

    def end_plan(self) -> Moves:
        """The plan is made. Returns the moves that it has to carry."""
        self.device.end_plan()
        self.host.end_plan()
        moves, self.moves = self.moves, Moves()
        return moves

    # Arithmetic

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, table: Sequence[int], num_tokens: int) -> int:
        """Blocks that a table lacks to hold so many tokens."""
        return max(0, self.num_blocks(num_tokens) - len(table))

    def num_tokens_within_free(self, table: Sequence[int]) -> int:
        """Tokens that a table could hold with every free block added to it."""
        return (len(table) + self.device.num_free) * self.block_size

    def num_freed_by(self, tables: Sequence[Sequence[int]]) -> int:
        """Blocks that would be free if these tables were released."""
        holders = Counter(block_id for table in tables for block_id in table)
        return sum(count == self.device.ref_count(block_id) for block_id, count in holders.items())

    def num_needed(self, found: Sequence[CachedBlock]) -> int:
        """Free blocks that cached blocks use up when they are taken."""
        return sum(block.tier is Tier.HOST or self.device.is_evictable(block.block_id) for block in found)

    # Tables on the device

    def extend(self, table: list[int], num_tokens: int) -> list[int]:
        """Appends free blocks to a table until it holds so many tokens; returns the appended ids."""
        if num_tokens <= len(table) * self.block_size:
            return []
        block_ids = self._allocate(self.num_missing(table, num_tokens))
        table += block_ids
        return block_ids

    def share(self, table: Sequence[int]) -> list[int]:
        """A second table of the same blocks."""
        for block_id in table:
            self.device.take(block_id)
        return list(table)

    def fork(self, table: Sequence[int], num_tokens: int, *, onto: int | None = None) -> list[int]:
        """A table that shares the first tokens of another one and can be written to behind them.

        Full blocks are shared. One that is written to in its middle is copied, to a free block, or to the held block
        `onto`, whose content nobody needs any more.
        """
        num_full, num_rest = divmod(num_tokens, self.block_size)
        forked = self.share(table[:num_full])
        if num_rest:
            forked += self._allocate(1) if onto is None else self.share([onto])
            self.moves.copies.append(table[num_full], forked[-1])
            self.counts.num_copied_blocks += 1
        return forked

    def release(self, table: list[int]) -> None:
        """Gives up a table's blocks and empties it."""
        self.device.release(table)
        table.clear()

    def is_writable(self, block_id: int) -> bool:
        """Whether a sequence that holds a block on the device may write to it: it alone holds it, and no hash names
        it."""
        return self.device.ref_count(block_id) == 1 and not self.device.is_kept(block_id)

    def _allocate(self, num_blocks: int) -> list[int]:
        while self.device.num_blank < num_blocks:
            self._evict()
        return self.device.allocate(num_blocks)

    # Cached prefixes

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """A held device block is full and its content accepted: others find it from now on, until it is evicted.

        Returns False, and changes nothing, where another block has that content already.
        """
        if block_hash in self.cache:
            return False
        self.cache.name(block_hash, Tier.DEVICE, block_id)
        self.device.keep(block_id)
        return True

    def take_cached(self, found: Sequence[CachedBlock]) -> list[int]:
        """A table of cached blocks. Those on the host are brought back, which takes a free block each."""
        for block in found:
            (self.device if block.tier is Tier.DEVICE else self.host).take(block.block_id)
        return [
            block.block_id if block.tier is Tier.DEVICE else self._bring_back(block.block_id, num_references=1)
            for block in found
        ]

    def flush(self) -> int:
        """Forgets every hash. Returns how many blocks were kept for their content alone; they are blank."""
        num_cached = self.device.num_cached + self.host.num_cached
        for tier, pool in ((Tier.DEVICE, self.device), (Tier.HOST, self.host)):
            for block_id in self.cache.named(tier):
                self.cache.forget(tier, block_id)
                pool.drop(block_id)
        return num_cached

    def _evict(self) -> None:
        """Makes the device's least recently used cached block blank. Its content goes to the host where there is
        room."""
        source = self.device.next_to_evict
        block_hash = self.cache.forget(Tier.DEVICE, source)
        self.device.drop(source)
        self.counts.num_evictions += 1
        if self.host.num_free == 0:
            return
        (target,) = self._allocate_host(1)
        self.moves.swap_out.append(source, target)
        self.cache.name(block_hash, Tier.HOST, target)
        self.host.keep(target)
        self.host.release([target])
        self.counts.num_demotions += 1

    def _allocate_host(self, num_blocks: int) -> list[int]:
        while self.host.num_blank < num_blocks:
            evicted = self.host.next_to_evict
            self.cache.forget(Tier.HOST, evicted)
            self.host.drop(evicted)
        return self.host.allocate(num_blocks)

    # Swapped tables

    def swap_out(self, tables: Sequence[list[int]]) -> list[list[int]]:
        """Moves tables to the host and returns them; the given ones are emptied. The host must have room.

        What the tables share they share there too. A hash goes with its block, unless others hold that on the device.
        """
        holders = Counter(block_id for table in tables for block_id in table)
        targets = dict(zip(holders, self._allocate_host(len(holders)), strict=True))
        for source, target in targets.items():
            self.moves.swap_out.append(source, target)
            for _ in range(holders[source] - 1):
                self.host.take(target)
            if self.device.is_kept(source) and self.device.ref_count(source) == holders[source]:
                self._rename(Tier.DEVICE, source, Tier.HOST, target)
        host_tables = [[targets[block_id] for block_id in table] for table in tables]
        for table in tables:
            self.release(table)
        self.counts.num_swapped_out_blocks += len(targets)
        return host_tables

    def swap_in(self, host_tables: Sequence[list[int]]) -> list[list[int]]:
        """Moves tables back to the device and returns them; the given ones are emptied. As many free blocks are needed
        as they have different ones."""
        holders = Counter(block_id for table in host_tables for block_id in table)
        targets = {source: self._bring_back(source, num_references=count) for source, count in holders.items()}
        tables = [[targets[block_id] for block_id in table] for table in host_tables]
        for table in host_tables:
            table.clear()
        return tables

    def release_host(self, table: list[int]) -> None:
        """Gives up a swapped-out table's blocks and empties it."""
        self.host.release(table)
        table.clear()

    def _bring_back(self, source: int, *, num_references: int) -> int:
        """Moves a held host block to the device, with so many of its references, and its hash."""
        (target,) = self._allocate(1)
        self.moves.swap_in.append(source, target)
        self.counts.num_swapped_in_blocks += 1
        if self.host.is_kept(source):
            self._rename(Tier.HOST, source, Tier.DEVICE, target)
        for _ in range(num_references - 1):
            self.device.take(target)
        for _ in range(num_references):
            self.host.release([source])
        return target

    def _rename(self, tier: Tier, block_id: int, new_tier: Tier, new_block_id: int) -> None:
        """A hash names the copy of a block from now on."""
        pools = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        block_hash = self.cache.forget(tier, block_id)
        pools[tier].drop(block_id)
        self.cache.name(block_hash, new_tier, new_block_id)
        pools[new_tier].keep(new_block_id)

    # Invariants

    def check_integrity(self, tables: Iterable[Sequence[int]], host_tables: Iterable[Sequence[int]] = ()) -> None:
        """Asserts on each tier that used + cached + blank + on the way back = total, that every reference count equals
        the tables that hold the block, and that hashes name blocks whose content is kept."""
        self.device.check_integrity(tables)
        self.host.check_integrity(host_tables)
        self.cache.check_integrity()
        for tier, pool in ((Tier.DEVICE, self.device), (Tier.HOST, self.host)):
            named = self.cache.named(tier)
            assert all(pool.is_kept(block_id) for block_id in named), f"a hash names a {tier.value} block not kept"
            assert len(named) == pool.num_kept, f"{tier.value} blocks are kept without a hash"
