"""Whose turn it is among the requests that have not started: priority, then the tenant that was served least.

    priority 0:  tenant a, served 120:  r1 r4 r5
                 tenant b, served  80:  r2 r3        <- r2 is next
    priority 1:  ...

A virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): an account counts the
tokens that were computed for a tenant at a priority, prompt and output alike. Who comes to wait is lifted to a floor,
so that nobody saves up turns while it asks for nothing. The floor is where the one that waits and was served least
stands, and it rises by each token's share for one tenant (the virtual time of Bennett and Zhang, "Hierarchical Packet
Fair Queueing Algorithms", SIGCOMM 1996): else those who were served once would wait for ever behind tenants that are
new, which come without an end where each request names another. Two tenants that both keep requests waiting are then
served alike, up to what one admission may bring: a request's prompt, and the output of what runs. With one tenant it is
first come, first served.

Choosing costs O(log n), however many tenants and requests wait; a token costs an addition. Requests that have started
are not in here: they keep their places (`queues.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_router.sequence import Sequence, SequenceGroup

LEAST_IDLE_ACCOUNTS = 64


class Account:
    """One tenant's at one priority.

    num_served: tokens computed for it and, with them, what it was lifted by. num_live: its requests that have not
    ended; num_waiting: its sequences in here. heap: those by arrival; some may have left.
    """

    __slots__ = ("heap", "is_listed", "level", "num_live", "num_served", "num_waiting", "number", "tenant")

    def __init__(self, level: _Level, tenant: str, number: int) -> None:
        self.level = level
        self.tenant = tenant
        self.number = number
        self.num_served = 0
        self.num_live = 0
        self.num_waiting = 0
        self.is_listed = False
        self.heap: list[tuple[int, int, Sequence]] = []

    def charge(self, num_tokens: int) -> None:
        """So many tokens were computed for it."""
        self.num_served += num_tokens
        self.level.num_served += num_tokens


class _Level:
    """The accounts of one priority. turns: who has a sequence that stands, least served first; an entry may be behind
    its account, never ahead of it. floor: where those who come to wait start at least; num_served: tokens computed for
    all, as far as the floor has not risen by them."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.accounts: dict[str, Account] = {}
        self.idle: set[str] = set()
        self.most_idle = LEAST_IDLE_ACCOUNTS
        self.turns: list[tuple[int, int, Account]] = []
        self.floor = 0
        self.num_served = 0
        self.num_opened = 0

    def raise_floor(self) -> None:
        """By one account's share of what was computed since the last time; to be called before accounts come or go."""
        share, self.num_served = divmod(self.num_served, max(1, len(self.accounts) - len(self.idle)))
        self.floor += share


class FairQueue:
    """Sequences of requests that have not started. is_standing: whether one is still here and not set aside."""

    def __init__(self, is_standing: Callable[[Sequence], bool]) -> None:
        self._is_standing = is_standing
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        self._listed: set[int] = set()

    @property
    def first(self) -> Sequence | None:
        """Who is next, or None."""
        while self._priorities:
            level = self._levels.get(self._priorities[0])
            if level is not None and (sequence := self._first_of(level)) is not None:
                return sequence
            self._listed.remove(heapq.heappop(self._priorities))
        return None

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence of a request that comes, or comes back from being set aside."""
        account = self._account_of(sequence.group)
        account.num_waiting += 1
        self.stand(sequence)

    def stand(self, sequence: Sequence) -> None:
        """A sequence that is counted has a turn, at the place of its arrival."""
        group = sequence.group
        account, level = self._account_of(group), self._levels[group.request.priority]
        heapq.heappush(account.heap, (group.arrival, sequence.sample_index, sequence))
        if not account.is_listed:
            level.raise_floor()
            if self._first_of(level) is not None:
                level.floor = max(level.floor, level.turns[0][2].num_served)
            account.num_served = max(account.num_served, level.floor)
            account.is_listed = True
            heapq.heappush(level.turns, (account.num_served, account.number, account))
        if level.priority not in self._listed:
            self._listed.add(level.priority)
            heapq.heappush(self._priorities, level.priority)

    def remove(self, sequence: Sequence) -> None:
        """Lets a sequence go that does not stand any more, because it started or left. It stays as a husk until it
        comes first or husks are the majority."""
        account = sequence.group.account
        assert account is not None
        account.num_waiting -= 1
        heap = account.heap
        if heap and heap[0][2] is sequence:
            heapq.heappop(heap)
        elif len(heap) > 2 * account.num_waiting + 16:
            heap[:] = [entry for entry in heap if self._is_standing(entry[2])]
            heapq.heapify(heap)

    def close(self, group: SequenceGroup) -> None:
        """A request has ended. An account without requests is kept for as long as others wait that were served less."""
        account = group.account
        if account is None:
            return
        group.account = None
        account.num_live -= 1
        if account.num_live:
            return
        level = account.level
        level.raise_floor()
        level.idle.add(account.tenant)
        nobody_waits = self._first_of(level) is None
        if nobody_waits or len(level.idle) > level.most_idle:
            least = None if nobody_waits else level.turns[0][2].num_served
            self._settle(level, least)

    def _settle(self, level: _Level, least: int | None) -> None:
        """Drops the idle accounts that would be lifted anyway, or all of them where nobody waits (None)."""
        for tenant in [tenant for tenant in level.idle if least is None or level.accounts[tenant].num_served <= least]:
            level.idle.remove(tenant)
            del level.accounts[tenant]
        level.most_idle = 2 * len(level.idle) + LEAST_IDLE_ACCOUNTS
        if not level.accounts:
            del self._levels[level.priority]

    def _account_of(self, group: SequenceGroup) -> Account:
        """A request's account, opened with its first sequence."""
        if group.account is not None:
            return group.account
        priority, tenant = group.request.priority, group.request.tenant
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(priority)
        account = level.accounts.get(tenant)
        if account is None:
            level.raise_floor()
            level.num_opened += 1
            account = level.accounts[tenant] = Account(level, tenant, level.num_opened)
        elif not account.num_live:
            level.raise_floor()
            level.idle.remove(tenant)
        account.num_live += 1
        group.account = account
        return account

    def _first_of(self, level: _Level) -> Sequence | None:
        """The first sequence of the account that was served least. Brings entries up to date until the first one is."""
        turns = level.turns
        while turns:
            num_served, number, account = turns[0]
            heap = account.heap
            while heap and not self._is_standing(heap[0][2]):
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(turns)
                account.is_listed = False
                if not turns:
                    level.floor = max(level.floor, account.num_served)
            elif num_served != account.num_served:
                heapq.heapreplace(turns, (account.num_served, number, account))
            else:
                return heap[0][2]
        return None
