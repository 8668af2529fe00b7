"""Who gives up blocks when there are none left, and by which way: to the host, or to be computed again.

- The last in order goes first, so the lowest priority and in it the youngest, and never somebody before the one in
  need. A request's sequences go together, since they share blocks; but samples make room for the first of their own.
- Whoever has a result on its way is held back from the step, and goes when the result is there and the need remains.
- Blocks given up by a plan are free from the next one on, so the one in need goes on then.
- Swapping costs the bytes of all blocks, out and in, at the measured rate; computing again costs the tokens of those
  blocks that nobody else holds. The cheaper way is taken; without a rate, or without room on the host, the latter.
"""

from __future__ import annotations

from octavo_router.batch import Batch
from octavo_router.draft import Draft
from octavo_router.limits import Limits
from octavo_router.sequence import Sequence


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
        sequences = _unit(victim, sequence)
        draft.num_coming += batch.blocks.num_freed_by([member.block_table for member in sequences])
        draft.held.update(member.sequence_id for member in sequences)
        if not any(member.num_plans for member in sequences):
            _preempt(batch, draft.limits, sequences)


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
    if is_whole_group and _swaps_faster(batch, limits, [sequence.block_table for sequence in sequences]):
        batch.swap_out(sequences)
    else:
        batch.preempt(sequences)


def _swaps_faster(batch: Batch, limits: Limits, tables: list[list[int]]) -> bool:
    """Whether these tables are sooner moved out and in again than computed, and the host has room for them."""
    num_blocks = len({block_id for table in tables for block_id in table})
    if num_blocks > batch.blocks.host.num_free or not (limits.swap_bytes_per_s and limits.prefill_tokens_per_s):
        return False
    num_tokens = batch.blocks.num_freed_by(tables) * limits.block_size
    swap_s = 2 * num_blocks * limits.bytes_per_block / limits.swap_bytes_per_s
    return swap_s < num_tokens / limits.prefill_tokens_per_s
