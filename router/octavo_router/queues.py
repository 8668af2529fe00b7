"""The two queues of the scheduler: who waits, and who is in the batch.

Both are ordered by `Sequence.order`: priority, then arrival, then sample. Neither decides who moves from one to the
other.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator

from octavo_router.sequence import Sequence

Order = tuple[int, int, int]

WakeKey = bytes | int
"""What a parked sequence waits for: a block's hash, or a sequence's id for its prompt."""


class WaitingQueue:
    """Sequences that wait for a place, first come first served within a priority; preempted ones at their old place.

    A member that would have to compute what another one computes right now is parked: others pass it until it is woken,
    and then it stands where it stood.

    A heap. A sequence that leaves from the middle stays as a husk until it reaches the top or husks are the majority,
    so that leaving costs O(1) and looking at the first O(log n), however many wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
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
        while self._heap and not self._is_standing(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence, at the place that its order gives it."""
        self._members[sequence.sequence_id] = sequence
        self._num_preempted += sequence.was_preempted
        heapq.heappush(self._heap, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Lets a member go, wherever it stands."""
        del self._members[sequence.sequence_id]
        self._num_preempted -= sequence.was_preempted
        if (key := self._parked_at.pop(sequence.sequence_id, None)) is not None:
            self._parked[key].pop(sequence.sequence_id)
            if not self._parked[key]:
                del self._parked[key]
        elif self._heap[0][1] is sequence:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [(m.order, m) for m in self._members.values() if self._is_standing(m)]
            heapq.heapify(self._heap)

    def park(self, sequence: Sequence, key: WakeKey) -> None:
        """Lets the others pass the first one, until `key` is woken."""
        assert self.first is sequence, f"sequence {sequence.sequence_id} is parked and not the first"
        heapq.heappop(self._heap)
        self._parked.setdefault(key, {})[sequence.sequence_id] = sequence
        self._parked_at[sequence.sequence_id] = key

    def wake(self, key: WakeKey) -> None:
        """Puts everyone back who was parked until this happened."""
        for sequence in self._parked.pop(key, {}).values():
            del self._parked_at[sequence.sequence_id]
            heapq.heappush(self._heap, (sequence.order, sequence))

    def wake_all(self) -> None:
        """Puts everyone back who is parked."""
        for key in list(self._parked):
            self.wake(key)

    def _is_standing(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._members and sequence.sequence_id not in self._parked_at


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
