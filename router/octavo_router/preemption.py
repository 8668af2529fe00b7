"""Who gives up blocks and places when there are none left, and by which way: to the host, or to be computed again.

- The last in order goes first, so the lowest priority and in it the youngest, and never somebody before the one in
  need. A request's sequences go together, since they share blocks; but samples make room for the first of their own.
- A waiting request takes places and blocks from those of a worse priority, never from its equals, and only where that
  is enough for it to start. Nobody gives way to arrivals more than MOST_EVICTIONS times: then it stays.
- Whoever has a result on its way is held back from the step, and goes when the result is there and the need remains.
- Blocks given up by a plan are free from the next one on, so the one in need goes on then.
- Swapping costs the bytes of all blocks, out and in, at the measured rate; computing again costs the tokens of those
  blocks that nobody else holds and whose content the prefix cache has in no other block, on either tier. Blocks that
  are given up count as lost though they are cached: it is they that are evicted next. The cheaper way is taken; without
  a rate, or without room on the host, the latter.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from octavo_router.batch import Batch
from octavo_router.draft import Draft
from octavo_router.limits import Limits
from octavo_router.prefix_cache import CachedBlock, Tier
from octavo_router.sequence import Sequence

MOST_EVICTIONS = 3


class Demand(NamedTuple):
    """What waiting sequences need to join the batch: places, and free blocks for all known tokens.

    Beside others they want more, so as not to start only to be preempted: num_following blocks for the rest of their
    group, and a spare one for each running sequence, doubled by each of num_preemptions.
    """

    num_places: int
    num_blocks: int
    num_following: int
    num_preemptions: int

    def num_wanted(self, num_running: int) -> int:
        """Free blocks to start with, beside so many."""
        return self.num_blocks + (self.num_following + (num_running << self.num_preemptions) if num_running else 0)

    def fits(self, *, num_places: int, num_spare: int, num_running: int) -> bool:
        """Whether it may join a batch with so many places and blocks to spare."""
        return self.num_places <= num_places and self.num_wanted(num_running) <= num_spare


def make_room(batch: Batch, draft: Draft, sequence: Sequence, num_blocks: int) -> None:
    """The sequence cannot go on for so many blocks: has the last in order give up theirs until enough will be free for
    everyone who had to stop. Whoever has nobody behind it just waits, with its blocks."""
    draft.num_owed += num_blocks
    while draft.num_owed > draft.num_coming:
        victim = next(draft.candidates, sequence)
        if victim.order <= sequence.order:
            draft.candidates = iter(())
            return
        if victim.sequence_id in draft.held:
            continue
        _hold_back(batch, draft, _unit(victim, sequence))


def make_way(batch: Batch, draft: Draft, sequence: Sequence, demand: Demand) -> None:
    """The first waiting sequence cannot join for want of places or blocks: has running sequences of a worse priority
    give up theirs, the last in order first, if it can join then. Free places and blocks are measured in the draft."""
    units: list[list[Sequence]] = []
    num_places, num_spare, num_running = draft.num_places, draft.num_spare + draft.num_coming, len(batch.running)
    seen = set()
    for victim in reversed(list(batch.running)):
        if demand.fits(num_places=num_places, num_spare=num_spare, num_running=num_running):
            break
        if victim.priority <= sequence.priority:
            return
        unit = victim.group.running
        if victim.group in seen or any(member.num_evictions >= MOST_EVICTIONS for member in unit):
            continue
        seen.add(victim.group)
        units.append(unit)
        num_places += len(unit) if victim.group.beams is None else victim.group.beams.width
        num_spare += batch.blocks.num_freed_by([member.block_table for member in unit])
        num_spare += sum(batch.blocks.num_missing(member.block_table, member.num_tokens) for member in unit)
        num_running -= len(unit)
    if not demand.fits(num_places=num_places, num_spare=num_spare, num_running=num_running):
        return
    for unit in units:
        if _hold_back(batch, draft, unit):
            batch.counts.num_priority_preemptions += len(unit)
            for member in unit:
                member.num_evictions += 1
    draft.num_owed += max(0, demand.num_wanted(num_running) - draft.num_spare)


def _hold_back(batch: Batch, draft: Draft, sequences: list[Sequence]) -> bool:
    """Leaves sequences out of the step, and preempts them unless a result of theirs is on its way. Returns whether it
    did."""
    draft.num_coming += batch.blocks.num_freed_by([member.block_table for member in sequences])
    draft.held.update(member.sequence_id for member in sequences)
    if any(member.num_plans for member in sequences):
        return False
    _preempt(batch, draft.limits, sequences)
    return True


def _unit(victim: Sequence, sequence: Sequence) -> list[Sequence]:
    """Who gives up blocks with the victim, so that the sequence can go on. No one, where a beam needs blocks and would
    take them from another: they go on together or not at all."""
    if victim.group is not sequence.group:
        return victim.group.running
    return [victim] if victim.group.beams is None else []


def _preempt(batch: Batch, limits: Limits, sequences: list[Sequence]) -> None:
    if not sequences:
        return
    is_whole_group = sequences[0].group.num_running == len(sequences)
    if is_whole_group and _swaps_faster(batch, limits, sequences):
        batch.swap_out(sequences)
    else:
        batch.preempt(sequences)


def _swaps_faster(batch: Batch, limits: Limits, sequences: list[Sequence]) -> bool:
    """Whether the sequences' tables are sooner moved out and in again than computed, and the host has room for them."""
    num_blocks = len({block_id for sequence in sequences for block_id in sequence.block_table})
    if num_blocks > batch.blocks.host.num_free or not (limits.swap_bytes_per_s and limits.prefill_tokens_per_s):
        return False
    num_tokens = _num_lost_blocks(batch, sequences) * limits.block_size
    swap_s = 2 * num_blocks * limits.bytes_per_block / limits.swap_bytes_per_s
    return swap_s < num_tokens / limits.prefill_tokens_per_s


def _num_lost_blocks(batch: Batch, sequences: list[Sequence]) -> int:
    """Blocks that would have to be computed again, were the sequences preempted without a swap."""
    device, cache = batch.blocks.device, batch.blocks.cache
    holders = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
    lost = {block_id for block_id, count in holders.items() if count == device.ref_count(block_id)}
    for sequence in sequences:
        table, block_hashes = sequence.block_table, sequence.block_hashes
        found = cache.match(block_hashes, min(len(block_hashes), len(table)))
        lost.difference_update(
            block_id
            for block_id, cached in zip(table, found, strict=False)
            if cached != CachedBlock(Tier.DEVICE, block_id)
        )
    return len(lost)
