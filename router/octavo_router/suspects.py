"""Who may have killed the worker, and who did: deaths of the worker are counted against the requests in its steps.

    first death     everyone in a plan in flight is suspected, and all are replayed together
    second death    who was there both times goes on alone, one after the other, until it is past where it was
    past that       a request is cleared as soon as the worker has computed what was in flight when it died
    convicted       a request that stays suspected for max_failures deaths, twice with nobody else in the step, fails

A worker that is killed from outside while many requests run so costs nobody more than a pause: clearing takes a request
a step or two. A request whose computation kills the worker, or stops it, fails behind max_failures deaths, or a few
more where others had to be cleared first. With a conviction all others are cleared.

Pure: told what happens, it says who may go on. Who runs, and how a request fails, is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo_router.sequence import Sequence, SequenceGroup

LEAST_DEATHS_ALONE = 2
LEAST_DEATHS_FOR_TRIAL = 2


@dataclass(slots=True)
class _Suspicion:
    """Against one request. marks: up to where each sequence that was in flight must be computed to be cleared."""

    num_deaths: int = 0
    num_deaths_alone: int = 0
    marks: dict[Sequence, int] = field(default_factory=dict)

    @property
    def is_refuted(self) -> bool:
        return all(not sequence.is_live or sequence.num_computed >= mark for sequence, mark in self.marks.items())


class Suspects:
    """The requests in whose steps workers died. max_failures: deaths behind which a request may fail for them."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._suspicions: dict[SequenceGroup, _Suspicion] = {}

    def __len__(self) -> int:
        return len(self._suspicions)

    @property
    def on_trial(self) -> SequenceGroup | None:
        """The request that goes on alone for now: suspected of the most deaths, of these the youngest. None: all go
        on together."""
        charged = [
            (suspicion.num_deaths, group.arrival, group)
            for group, suspicion in self._suspicions.items()
            if suspicion.num_deaths >= LEAST_DEATHS_FOR_TRIAL
        ]
        return max(charged, key=lambda entry: entry[:2])[2] if charged else None

    def worker_died(self, in_flight: Iterable[Sequence]) -> tuple[SequenceGroup, str] | None:
        """The worker died with these sequences in its plans. Returns the request that is to fail for it, and why.

        To be called while they still have what was planned for them.
        """
        sequences = [sequence for sequence in in_flight if sequence.is_live]
        groups = {sequence.group: None for sequence in sequences}
        for group in groups:
            suspicion = self._suspicions.setdefault(group, _Suspicion())
            suspicion.num_deaths += 1
            suspicion.num_deaths_alone += len(groups) == 1
        for sequence in sequences:
            marks = self._suspicions[sequence.group].marks
            marks[sequence] = max(sequence.num_planned, marks.get(sequence, 0))
        for group in groups:
            suspicion = self._suspicions[group]
            if self._is_convicted(suspicion):
                self._suspicions.clear()
                return group, (
                    f"the worker was lost {_times(suspicion.num_deaths)} while it computed this request, "
                    f"{_times(suspicion.num_deaths_alone)} with no other beside it; it is not tried again"
                )
        return None

    def _is_convicted(self, suspicion: _Suspicion) -> bool:
        return suspicion.num_deaths >= self._max_failures and suspicion.num_deaths_alone >= min(
            LEAST_DEATHS_ALONE, self._max_failures
        )

    def computed(self, sequences: Iterable[Sequence]) -> None:
        """The worker has computed something of these: whoever is past where it was is cleared."""
        for group in {sequence.group: None for sequence in sequences}:
            suspicion = self._suspicions.get(group)
            if suspicion is not None and suspicion.is_refuted:
                del self._suspicions[group]

    def forget(self, group: SequenceGroup) -> None:
        """A request has ended."""
        self._suspicions.pop(group, None)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
