"""The two queues of the scheduler: who waits, and who is in the batch.

Both are ordered by `Sequence.order`: priority, then arrival, then sample. Neither decides who moves from one to the
other.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator

from octavo_router.sequence import Sequence, SequenceStatus

Order = tuple[int, int, int]


class WaitingQueue:
    """Sequences that wait for a place, first come first served within a priority; preempted ones at their old place.

    A heap. A sequence that leaves from the middle stays as a husk until it reaches the top or husks are the majority,
    so that leaving costs O(1) and looking at the first O(log n), however many wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        self._members: dict[int, Sequence] = {}
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
    def first(self) -> Sequence | None:
        """Who is next, or None."""
        while self._heap and self._heap[0][1].sequence_id not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence, at the place that its order gives it."""
        self._members[sequence.sequence_id] = sequence
        self._num_preempted += sequence.status is SequenceStatus.PREEMPTED
        heapq.heappush(self._heap, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Lets a member go, wherever it stands."""
        del self._members[sequence.sequence_id]
        self._num_preempted -= sequence.status is SequenceStatus.PREEMPTED
        if self._heap[0][1] is sequence:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [(member.order, member) for member in self._members.values()]
            heapq.heapify(self._heap)


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
