"""Who waits, who runs, and with which blocks: every change of a sequence's place, with all that belongs to it.

    waiting --start--> running --preempt--> waiting, nothing computed
       ^                 |  ^------swap_in-----+
       |                 +--swap_out--> waiting, blocks on the host
       +-- lose_all (the worker is gone)
    any of them --leave--> finished

Keeps queues, tables and releases in step with each other. Who changes places is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from octavo_router.block_manager import BlockManager
from octavo_router.counts import Counts
from octavo_router.limits import Limits
from octavo_router.prefix_sharing import PrefixSharing
from octavo_router.queues import RunningQueue, WaitingQueue
from octavo_router.sequence import Sequence, SequenceGroup, SequenceStatus


class Batch:
    """The queues and the blocks. releases: sequences that the worker has to be told to forget."""

    def __init__(self, limits: Limits) -> None:
        self.waiting = WaitingQueue()
        self.running = RunningQueue()
        self.counts = Counts()
        self.reset(limits)

    def reset(self, limits: Limits) -> None:
        """Empty pools. Nobody may run."""
        assert not len(self.running), "blocks are reset under running sequences"
        self.blocks = BlockManager(
            block_size=limits.block_size,
            num_device_blocks=limits.num_device_blocks,
            num_host_blocks=limits.num_host_blocks,
            enable_prefix_caching=limits.enable_prefix_caching,
            counts=self.counts,
        )
        self.prefixes = PrefixSharing(self.blocks, self.waiting, model_digest=limits.model_digest)
        self.releases: list[int] = []

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence joins the batch."""
        if not sequence.group.is_admitted:
            self.waiting.admit(sequence.group)
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)
        sequence.group.num_running += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence ends, wherever it is."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
            self.blocks.release(sequence.block_table)
        else:
            self.blocks.release_host(sequence.host_table)
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def preempt(self, sequences: Sequences[Sequence]) -> None:
        """Running sequences of one group give up their blocks and wait at their old places to be computed again."""
        for sequence in sequences:
            self._stop(sequence)
            self.blocks.release(sequence.block_table)
            self._wait_again(sequence, SequenceStatus.PREEMPTED)
            sequence.start_over()
            sequence.num_preemptions += 1
        self.counts.num_recompute_preemptions += len(sequences)
        _settle_beams(sequences[0].group)

    def swap_out(self, sequences: Sequences[Sequence]) -> None:
        """The blocks of running sequences go to the host, and they wait at their old places."""
        host_tables = self.blocks.swap_out([sequence.block_table for sequence in sequences])
        for sequence, host_table in zip(sequences, host_tables, strict=True):
            sequence.host_table = host_table
            self._stop(sequence)
            self._wait_again(sequence, SequenceStatus.SWAPPED)
            sequence.num_preemptions += 1
        self.counts.num_swap_preemptions += len(sequences)

    def swap_in(self, sequences: Sequences[Sequence]) -> None:
        """Swapped-out sequences of one group join the batch with their blocks."""
        tables = self.blocks.swap_in([sequence.host_table for sequence in sequences])
        for sequence, table in zip(sequences, tables, strict=True):
            sequence.block_table = table
            self.start(sequence)
            self.prefixes.announce(sequence)

    def lose_all(self) -> None:
        """The worker is gone with all it held: everyone who ran waits to be computed again."""
        running = list(self.running)
        groups = {sequence.group: None for sequence in [*running, *self.waiting]}
        for sequence in running:
            self.running.remove(sequence)
            self._wait_again(sequence, SequenceStatus.PREEMPTED)
        for sequence in self.waiting:
            if sequence.status is SequenceStatus.SWAPPED:
                sequence.status = SequenceStatus.PREEMPTED
            sequence.block_table.clear()
            sequence.host_table.clear()
            sequence.block_hashes.clear()
            sequence.start_over()
        for group in groups:
            group.num_running = 0
            group.prompt_hashes.clear()
            _settle_beams(group)
        self.waiting.wake_all()

    def _stop(self, sequence: Sequence) -> None:
        """A running sequence leaves the batch, here and on the worker."""
        self.running.remove(sequence)
        sequence.group.num_running -= 1
        self.releases.append(sequence.sequence_id)
        self.prefixes.withdraw(sequence)

    def _wait_again(self, sequence: Sequence, status: SequenceStatus) -> None:
        sequence.status = status
        self.waiting.add(sequence)


def _settle_beams(group: SequenceGroup) -> None:
    """Beams that lost their blocks: where the search goes next is carried out on their tokens alone, and a round that
    was not full is lost."""
    beams = group.beams
    if beams is None:
        return
    beams.drop_candidates()
    if beams.step is None:
        return
    parents = [group.sequences[parent].output_token_ids for parent in beams.step.parents]
    outputs = [[*parent, token_id] for parent, token_id in zip(parents, beams.step.token_ids, strict=True)]
    for sequence, output in zip(group.sequences, outputs, strict=True):
        sequence.output_token_ids = output
        sequence.block_hashes.clear()
    beams.carried_out()
