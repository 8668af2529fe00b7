"""Carries out where a beam search goes next: beams take over each other's blocks, copy what they both write to, and let
go of what nobody continues.

The decision is `beam_search.py`'s, the round's state `beam_group.py`'s. A fork needs free blocks like any other step.
"""

from __future__ import annotations

from octavo_router.batch import Batch
from octavo_router.draft import Draft
from octavo_router.preemption import make_room
from octavo_router.sequence import Sequence, SequenceGroup, SequenceStatus


def fork(batch: Batch, draft: Draft, group: SequenceGroup) -> None:
    """Puts the forks of a group's decided step into the plan, all of them, or sees to it that a later plan can.

    Every beam is in the batch and has all its tokens computed. The first to continue a parent goes on in its blocks;
    each other copies the block that it is going to write to, onto the last block of a beam that nobody continues. So
    only the first fork, which makes beams of one, needs free blocks.
    """
    state = group.beams
    assert state is not None
    assert state.step is not None
    num_tokens = group.sequences[0].num_tokens
    parents = [group.sequences[index] for index in state.step.parents]
    children = [_Child(parent, token_id) for parent, token_id in zip(parents, state.step.token_ids, strict=True)]
    dropped = [sequence for sequence in group.running if sequence not in parents]
    if num_tokens % batch.blocks.block_size == 0:
        _divide_blocks(batch, children, [])
    else:
        num_lacking = state.width - len(set(state.step.parents)) - len(dropped)
        if num_lacking > batch.blocks.device.num_free:
            make_room(batch, draft, group.sequences[0], num_lacking)
            return
        _divide_blocks(batch, children, [sequence.block_table[-1] for sequence in dropped])
    for sequence in group.running:
        batch.blocks.release(sequence.block_table)
    for sequence, child in zip(group.sequences, children, strict=True):
        if sequence.status is not SequenceStatus.RUNNING:
            batch.start(sequence)
        child.become(sequence, num_tokens)
        draft.forks.append(
            child.parent.sequence_id,
            sequence.sequence_id,
            num_kept=num_tokens,
            token_id=child.output_token_ids[-1],
            table=child.table,
        )
    state.carried_out()


class _Child:
    """What a beam of the next round is, before any beam of this one is changed."""

    def __init__(self, parent: Sequence, token_id: int) -> None:
        self.parent = parent
        self.output_token_ids = [*parent.output_token_ids, token_id]
        self.block_hashes = list(parent.block_hashes)
        self.num_published = parent.num_published
        self.table: list[int] = []

    def become(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes a beam's sequence this child, with so many tokens computed."""
        sequence.output_token_ids = self.output_token_ids
        sequence.block_hashes = self.block_hashes
        sequence.block_table = self.table
        sequence.num_planned = sequence.num_computed = num_tokens
        sequence.num_published = self.num_published


def _divide_blocks(batch: Batch, children: list[_Child], spare: list[int]) -> None:
    """Gives each child its table. spare: held blocks to copy onto."""
    continued: set[int] = set()
    for child in children:
        parent = child.parent
        if parent.sequence_id in continued:
            onto = spare.pop() if spare else None
            child.table = batch.blocks.fork(parent.block_table, parent.num_tokens, onto=onto)
        else:
            continued.add(parent.sequence_id)
            child.table = batch.blocks.share(parent.block_table)
