"""The two queues of the scheduler: who waits, and who is in the batch.

Those who have started once are ordered by `Sequence.order`: priority, then admission, then sample. Those who have not
take turns by `fairness.py`. Neither queue decides who moves from one to the other.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator

from octavo_router.fairness import FairQueue
from octavo_router.sequence import Sequence, SequenceGroup

Order = tuple[int, int, int]

WakeKey = bytes | int
"""What a parked sequence waits for: a block's hash, or a sequence's id for its prompt."""


class WaitingQueue:
    """Sequences that wait for a place: by priority; in it first those whose requests were admitted before, at their old
    places, then the others in fair turns among tenants.

    A member that would have to compute what another one computes right now is parked: others pass it until it is woken,
    and then it stands where it stood.

    only: the one request that may go on for now, or None; all others stand aside (`suspects.py`).

    Heaps. A sequence that leaves from the middle stays as a husk until it reaches the top or husks are the majority,
    so that leaving costs O(1) and looking at the first O(log n), however many wait.
    """

    def __init__(self) -> None:
        self.only: SequenceGroup | None = None
        self._admitted: list[tuple[Order, Sequence]] = []
        self._fresh = FairQueue(self._is_fresh)
        self._num_admissions = 0
        self._members: dict[int, Sequence] = {}
        self._parked: dict[WakeKey, dict[int, Sequence]] = {}
        self._parked_at: dict[int, WakeKey] = {}
        self._num_preempted = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """All, in no order."""
        return iter(self._members.values())

    @property
    def num_preempted(self) -> int:
        """How many of them ran before."""
        return self._num_preempted

    @property
    def num_parked(self) -> int:
        """How many of them wait to be woken."""
        return len(self._parked_at)

    @property
    def first(self) -> Sequence | None:
        """Who is next, or None."""
        if self.only is not None:
            return next((sequence for sequence in self.only.sequences if self._is_standing(sequence)), None)
        while self._admitted and not self._is_standing(self._admitted[0][1]):
            heapq.heappop(self._admitted)
        fresh = self._fresh.first
        if not self._admitted:
            return fresh
        admitted = self._admitted[0][1]
        return fresh if fresh is not None and fresh.priority < admitted.priority else admitted

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence, at the place that is its own."""
        self._members[sequence.sequence_id] = sequence
        self._num_preempted += sequence.was_preempted
        if sequence.group.is_admitted:
            heapq.heappush(self._admitted, (sequence.order, sequence))
        else:
            self._fresh.add(sequence)

    def admit(self, group: SequenceGroup) -> None:
        """A request begins to start: it has its place from now on, behind all that were admitted before it, and its
        sequences that still wait go ahead of those that were not."""
        self._num_admissions += 1
        for sequence in group.sequences:
            sequence.order = (group.request.priority, self._num_admissions, sequence.sample_index)
        group.is_admitted = True
        for sequence in group.sequences:
            if sequence.sequence_id in self._members:
                self._fresh.remove(sequence)
                if self._is_standing(sequence):
                    heapq.heappush(self._admitted, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Lets a member go, wherever it stands."""
        del self._members[sequence.sequence_id]
        self._num_preempted -= sequence.was_preempted
        if (key := self._parked_at.pop(sequence.sequence_id, None)) is not None:
            self._parked[key].pop(sequence.sequence_id)
            if not self._parked[key]:
                del self._parked[key]
        if not sequence.group.is_admitted:
            self._fresh.remove(sequence)
        elif self._admitted and self._admitted[0][1] is sequence:
            heapq.heappop(self._admitted)
        elif len(self._admitted) > 2 * len(self._members) + 16:
            members = self._members.values()
            self._admitted = [(m.order, m) for m in members if m.group.is_admitted and self._is_standing(m)]
            heapq.heapify(self._admitted)

    def close(self, group: SequenceGroup) -> None:
        """A request has ended."""
        self._fresh.close(group)

    def park(self, sequence: Sequence, key: WakeKey) -> None:
        """Lets the others pass the first one, until `key` is woken."""
        assert self.first is sequence, f"sequence {sequence.sequence_id} is parked and not the first"
        self._parked.setdefault(key, {})[sequence.sequence_id] = sequence
        self._parked_at[sequence.sequence_id] = key

    def wake(self, key: WakeKey) -> None:
        """Puts everyone back who was parked until this happened."""
        for sequence in self._parked.pop(key, {}).values():
            del self._parked_at[sequence.sequence_id]
            if sequence.group.is_admitted:
                heapq.heappush(self._admitted, (sequence.order, sequence))
            else:
                self._fresh.stand(sequence)

    def wake_all(self) -> None:
        """Puts everyone back who is parked."""
        for key in list(self._parked):
            self.wake(key)

    def _is_standing(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._members and sequence.sequence_id not in self._parked_at

    def _is_fresh(self, sequence: Sequence) -> bool:
        return self._is_standing(sequence) and not sequence.group.is_admitted


class RunningQueue:
    """The batch: sequences that hold blocks on the device, oldest first."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. Iterate over a copy where members may leave meanwhile."""
        return iter(self._sequences)

    @property
    def last(self) -> Sequence | None:
        """Who is the first to give way, or None."""
        return self._sequences[-1] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence, at the place that its order gives it."""
        index = bisect_left(self._orders, sequence.order)
        self._orders.insert(index, sequence.order)
        self._sequences.insert(index, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Lets a member go."""
        index = bisect_left(self._orders, sequence.order)
        assert self._sequences[index] is sequence
        del self._orders[index], self._sequences[index]
