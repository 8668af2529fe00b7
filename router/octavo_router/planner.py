"""The policy of a step: who goes on, who starts, with how many tokens and which blocks.

- Order is priority (lower first), then admission, then sample. It holds for getting blocks, and, backwards, for giving
  them up. A preempted sequence keeps its place. Who is admitted next within a priority is decided between tenants
  (`fairness`); of one tenant's it is the first to arrive.
- Whoever waits with a better priority than somebody who runs takes that one's place and blocks (`preemption`).
- A step has a budget of tokens. Decodes take theirs first, then running prefills, then waiting sequences; a prompt that
  is too long for what is left is split (chunked prefill) or, where that is switched off, waits for a step with room for
  all of it.
- Nothing is computed twice (`prefix_sharing`): a sequence starts with the blocks of its group's prompt, or with the
  longest cached prefix; what somebody else computes right now it waits for, and others may pass it meanwhile.
- Otherwise strictly one after the other: when the first waiting sequence cannot start, nobody overtakes it. It starts
  when the pool has room for all its known tokens beside what running prefills still need and one spare block for each
  running sequence, so that it is not started only to be preempted.
- Blocks are taken on demand, for the tokens of the step alone. When none is left, the last in order give up theirs
  (`preemption`). The first in order always goes on.
- Each preemption doubles the spare blocks that a sequence waits for before it starts again. So one request is preempted
  at most log2(pool) + 2 times by those before it; after that it starts only when it runs alone.
- Lookahead: a decode is planned before the result that brings its token is back. It is known beforehand when max_tokens
  is reached; only a stop or end-of-sequence token makes a plan compute a token too many, which is dropped.
- Beams go in step: the next round is planned when every beam's candidates are there. Their places in the batch are
  set aside from the start (`beams`).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from octavo_router import beams
from octavo_router.batch import Batch
from octavo_router.draft import Draft, Row
from octavo_router.limits import Limits
from octavo_router.preemption import Demand, make_room, make_way
from octavo_router.prefix_sharing import Reuse
from octavo_router.queues import WakeKey
from octavo_router.sequence import Sequence, SequenceGroup, SequenceStatus

_RUNNING = SequenceStatus.RUNNING  # looked up once: a member of an enum costs more than the comparison with it


class Planner:
    """Fills the plans of one session."""

    def __init__(self, batch: Batch, limits: Limits) -> None:
        self._batch = batch
        self._blocks = batch.blocks
        self._limits = limits

    def fill(self, draft: Draft) -> None:
        """Puts into a plan what the step computes, and changes the batch accordingly."""
        self._make_way(draft)
        self._continue_running(draft)
        self._start_waiting(draft)

    def _make_way(self, draft: Draft) -> None:
        """Whoever waits first gets what it lacks to start from those of a worse priority that run."""
        sequence, last = self._batch.waiting.first, self._batch.running.last
        if sequence is None or last is None or last.priority <= sequence.priority:
            return
        if sequence.group.beams is not None and sequence.group.num_running:
            return  # it is not its turn: beams join with the first one
        self._measure_room(draft)
        if sequence.status is SequenceStatus.SWAPPED:
            make_way(self._batch, draft, sequence, self._demand_to_return(_swapped(sequence.group)))
        elif isinstance(reuse := self._batch.prefixes.find(sequence, draft), Reuse):
            make_way(self._batch, draft, sequence, self._demand_to_start(draft, sequence, reuse))
        draft.candidates = reversed(list(self._batch.running))

    def _continue_running(self, draft: Draft) -> None:
        """Everyone in the batch goes on, oldest first, as far as budget and blocks reach."""
        unplanned = [
            (sequence, sequence.is_decode)
            for sequence in self._batch.running
            if sequence.num_due or sequence.group.has_beams_to_move
        ]
        draft.num_decodes_to_come = sum(is_decode for _, is_decode in unplanned)
        for sequence, is_decode in unplanned:
            draft.num_decodes_to_come -= is_decode
            if sequence.status is _RUNNING and sequence.sequence_id not in draft.held:
                if sequence.group.beams is not None and sequence.group.has_beams_to_move:
                    self._move_beams(draft, sequence.group)
                self._continue(draft, sequence)

    def _continue(self, draft: Draft, sequence: Sequence) -> None:
        """Schedules what budget and free blocks allow; without a free block, sees to it that a later plan has some."""
        num_due = sequence.num_due
        if not num_due or sequence.sequence_id in draft.rows:
            return
        num_tokens = draft.num_affordable(num_due)
        num_fitting = self._blocks.num_tokens_within_free(sequence.block_table) - sequence.num_planned
        if num_tokens == 0:
            return
        if num_fitting <= 0:
            num_missing = self._blocks.num_missing(sequence.block_table, sequence.num_planned + num_tokens)
            make_room(self._batch, draft, sequence, num_missing)
        else:
            self._schedule(draft, sequence, min(num_tokens, num_fitting))

    def _move_beams(self, draft: Draft, group: SequenceGroup) -> None:
        """Beams that wait to be forked are, and those that are missing from the batch join it."""
        assert group.beams is not None
        if group.beams.step is not None:
            beams.fork(self._batch, draft, group)
            for sequence in group.running:
                self._continue(draft, sequence)
            return
        for sequence in group.sequences[: group.beams.num_active]:
            if sequence.status is not SequenceStatus.PREEMPTED and sequence.status is not SequenceStatus.WAITING:
                continue
            reuse = self._batch.prefixes.find(sequence, draft)
            if not isinstance(reuse, Reuse):
                return
            num_blocks = self._num_lacking(sequence, reuse)
            if num_blocks > self._blocks.device.num_free:
                make_room(self._batch, draft, sequence, num_blocks)
                return
            if draft.num_affordable(sequence.num_tokens - reuse.num_tokens) == 0:
                return
            self._start(draft, sequence, reuse)

    def _start_waiting(self, draft: Draft) -> None:
        """Waiting sequences join the batch in their order, until the first that cannot."""
        if draft.num_owed or self._batch.waiting.first is None:
            return
        self._measure_room(draft)
        while (sequence := self._batch.waiting.first) is not None and draft.num_places > 0:
            if sequence.status is SequenceStatus.SWAPPED:
                has_moved = self._return(draft, sequence.group)
            else:
                has_moved = self._start_or_park(draft, sequence)
            if not has_moved:
                return

    def _measure_room(self, draft: Draft) -> None:
        """What those who run do not need: places, beside those set aside for beams to come, and blocks."""
        draft.num_places = self._limits.max_num_running - len(self._batch.running)
        draft.num_spare = self._blocks.device.num_free
        groups = set()
        for sequence in self._batch.running:
            draft.num_spare -= self._blocks.num_missing(sequence.block_table, sequence.num_tokens)
            if sequence.group.beams is not None:
                groups.add(sequence.group)
        for group in groups:
            assert group.beams is not None
            draft.num_places -= group.beams.width - group.num_running
            draft.num_spare -= self._num_following(group.sequences[group.num_running :])

    def _start_or_park(self, draft: Draft, sequence: Sequence) -> bool:
        """Starts the first waiting sequence, or lets others pass it until what it waits for is computed. Returns
        whether either was done; otherwise nobody may pass it."""
        group = sequence.group
        if group.beams is not None and group.num_running:
            return self._park(sequence, group.running[0].sequence_id)
        reuse = self._batch.prefixes.find(sequence, draft)
        if not isinstance(reuse, Reuse):
            return self._park(sequence, reuse)
        demand = self._demand_to_start(draft, sequence, reuse)
        if not self._has_room(draft, demand):
            return False
        if draft.num_affordable(sequence.num_tokens - reuse.num_tokens) == 0:
            return False
        draft.num_places -= demand.num_places
        draft.num_spare -= demand.num_blocks + (demand.num_following if group.beams is not None else 0)
        self._start(draft, sequence, reuse)
        return True

    def _has_room(self, draft: Draft, demand: Demand) -> bool:
        num_running = len(self._batch.running)
        return demand.fits(num_places=draft.num_places, num_spare=draft.num_spare, num_running=num_running)

    def _demand_to_start(self, draft: Draft, sequence: Sequence, reuse: Reuse) -> Demand:
        """What the first waiting sequence needs. With nobody else in the batch it starts if it fits, and the rest of
        its group follows as it can."""
        group = sequence.group
        return Demand(
            num_places=1 if group.beams is None else group.beams.width,
            num_blocks=self._num_lacking(sequence, reuse),
            num_following=0 if group.num_running else self._num_following(self._others_to_start(draft, sequence)),
            num_preemptions=sequence.num_preemptions,
        )

    def _demand_to_return(self, swapped: Sequences[Sequence]) -> Demand:
        """What the swapped-out sequences of a group need."""
        group = swapped[0].group
        num_blocks = len({block_id for sequence in swapped for block_id in sequence.host_table})
        num_blocks += sum(self._blocks.num_missing(sequence.host_table, sequence.num_tokens) for sequence in swapped)
        return Demand(
            num_places=len(swapped) if group.beams is None else group.beams.width - group.num_running,
            num_blocks=num_blocks,
            num_following=0,
            num_preemptions=max(sequence.num_preemptions for sequence in swapped),
        )

    def _park(self, sequence: Sequence, key: WakeKey) -> bool:
        """Lets others pass the first waiting sequence. So many may stand aside as may run, so that a step never costs
        more for more who wait. Returns whether it did."""
        if self._batch.waiting.num_parked >= self._limits.max_num_running:
            return False
        self._batch.waiting.park(sequence, key)
        return True

    def _num_lacking(self, sequence: Sequence, reuse: Reuse) -> int:
        """Free blocks that a sequence needs for all its known tokens."""
        return self._blocks.num_blocks(sequence.num_tokens) - reuse.num_blocks + reuse.num_free

    def _num_following(self, sequences: Sequences[Sequence]) -> int:
        """Free blocks that sequences need at least which start behind another one of their group, whose prompt they
        share."""
        return sum(
            max(
                1,
                self._blocks.num_blocks(sequence.num_tokens)
                - (len(sequence.prompt_token_ids) - 1) // self._blocks.block_size,
            )
            for sequence in sequences
        )

    def _others_to_start(self, draft: Draft, sequence: Sequence) -> list[Sequence]:
        """The members of a sequence's group for which there are places behind it."""
        others = [member for member in sequence.group.sequences if member.is_live and member is not sequence]
        return others[: max(0, draft.num_places - 1)]

    def _start(self, draft: Draft, sequence: Sequence, reuse: Reuse) -> None:
        """Moves a waiting sequence into the batch, with what it need not compute, and schedules the rest."""
        if sequence.group.started_at is None:
            self._note_first_start(draft, sequence.group, reuse)
        self._batch.start(sequence)
        self._batch.prefixes.take(sequence, reuse)
        draft.started.add(sequence.sequence_id)
        draft.new_sequences.append(sequence.new_sequence())
        self._schedule(draft, sequence, draft.num_affordable(sequence.num_to_compute))

    def _note_first_start(self, draft: Draft, group: SequenceGroup, reuse: Reuse) -> None:
        draft.first_started.append(group)
        num_prompt = len(group.request.prompt_token_ids)
        group.started_at = draft.now
        group.num_cached_tokens = min(num_prompt, reuse.num_tokens)
        group.charge(num_prompt - group.num_cached_tokens)
        if self._blocks.enable_prefix_caching:
            counts = self._batch.counts
            counts.num_prefix_query_tokens += num_prompt
            counts.num_prefix_hit_tokens += group.num_cached_tokens
            counts.num_prefix_hit_host_tokens += min(num_prompt, reuse.num_host_blocks * self._blocks.block_size)

    def _return(self, draft: Draft, group: SequenceGroup) -> bool:
        """Moves a group's swapped-out sequences back into the batch, all at once. Returns whether they fit."""
        swapped = _swapped(group)
        demand = self._demand_to_return(swapped)
        if not self._has_room(draft, demand) or not draft.num_affordable(1):
            return False
        draft.num_places -= demand.num_places
        draft.num_spare -= demand.num_blocks
        self._batch.swap_in(swapped)
        for sequence in swapped:
            draft.started.add(sequence.sequence_id)
            draft.new_sequences.append(sequence.new_sequence())
            self._continue(draft, sequence)
        return True

    def _schedule(self, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        """Puts a sequence's next tokens into the step. The blocks for them are free."""
        start, table = sequence.num_planned, sequence.block_table
        if start < len(table) * self._blocks.block_size:
            block_id = table[start // self._blocks.block_size]
            assert self._blocks.is_writable(block_id), f"block {block_id} is shared and would be written to"
        samples = num_tokens == sequence.num_to_compute and not sequence.group.is_prompt_only
        is_prefill = num_tokens > 1 or start < len(sequence.prompt_token_ids)
        row = Row(sequence, start, num_tokens, samples, is_prefill, self._blocks.extend(table, start + num_tokens))
        sequence.num_planned += num_tokens
        sequence.num_plans += 1
        sequence.num_in_flight += samples and sequence.group.beams is None
        draft.add(row)


def _swapped(group: SequenceGroup) -> list[Sequence]:
    return [sequence for sequence in group.sequences if sequence.status is SequenceStatus.SWAPPED]
