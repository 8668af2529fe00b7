"""Turns among tenants: served alike while they ask, nothing saved up while they do not, and nobody forgotten."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from octavo_router.fairness import LEAST_IDLE_ACCOUNTS, FairQueue
from octavo_router.sequence import SequenceGroup
from tests.router.harness import EOS, Harness, make_limits, make_request


class Turns:
    """A queue of requests of one sequence each, which start when they are taken."""

    def __init__(self) -> None:
        self.standing: set[int] = set()
        self.queue = FairQueue(lambda sequence: sequence.sequence_id in self.standing)
        self._arrivals = itertools.count(1)

    def add(self, tenant: str, priority: int = 0) -> SequenceGroup:
        arrival = next(self._arrivals)
        group = SequenceGroup(
            make_request(f"{tenant}{arrival}", tenant=tenant, priority=priority),
            arrival=arrival,
            first_sequence_id=arrival,
            eos_token_ids=EOS,
            now=0.0,
        )
        self.standing.add(arrival)
        self.queue.add(group.sequences[0])
        return group

    def take(self, num_tokens: int = 10) -> SequenceGroup:
        """The next one, charged with so much."""
        sequence = self.queue.first
        assert sequence is not None
        self.leave(sequence.group)
        sequence.group.charge(num_tokens)
        return sequence.group

    def leave(self, group: SequenceGroup) -> None:
        self.standing.remove(group.arrival)
        self.queue.remove(group.sequences[0])

    def names(self, count: int) -> str:
        """Whose turn it is, so many times; each request ends with its turn."""
        tenants = []
        for _ in range(count):
            group = self.take()
            tenants.append(group.request.tenant)
            self.queue.close(group)
        return "".join(tenants)


def test_one_tenant_is_first_come_first_served() -> None:
    turns = Turns()
    groups = [turns.add("a") for _ in range(20)]
    assert [turns.take(random.Random(1).randint(0, 99)) for _ in groups] == groups
    assert turns.queue.first is None


def test_two_tenants_take_turns_however_many_requests_they_have() -> None:
    turns = Turns()
    for _ in range(10):
        turns.add("a")
    for _ in range(3):
        turns.add("b")
    assert turns.names(10) == "abababaaaa"


def test_who_costs_more_has_fewer_turns() -> None:
    turns = Turns()
    for tenant in "aabbbbbbbb":
        turns.add(tenant)
    taken = []
    for _ in range(10):
        sequence = turns.queue.first
        assert sequence is not None
        tenant = sequence.group.request.tenant
        turns.take(40 if tenant == "a" else 10)
        taken.append(tenant)
    assert "".join(taken) == "abbbbabbbb"


def test_priorities_come_before_fairness() -> None:
    turns = Turns()
    for tenant, priority in (("a", 1), ("b", 1), ("a", 0), ("a", 0), ("a", -5)):
        turns.add(tenant, priority)
    taken = [turns.take() for _ in range(5)]
    assert [(group.request.tenant, group.request.priority) for group in taken] == [
        ("a", -5),
        ("a", 0),
        ("a", 0),
        ("a", 1),
        ("b", 1),
    ]


def test_who_asked_for_nothing_has_nothing_saved_up() -> None:
    turns = Turns()
    turns.add("b")
    for _ in range(20):
        turns.add("a")
    assert turns.names(12) == "baaaaaaaaaaa"
    for _ in range(8):
        turns.add("b")
    assert turns.names(8) == "abababab"


def test_output_counts_while_others_wait() -> None:
    turns = Turns()
    first = turns.add("a")
    for tenant in "aabb":
        turns.add(tenant)
    assert turns.take() is first
    first.charge(100)  # its output, while nobody could start
    assert turns.names(4) == "bbaa"


def test_leaving_costs_nothing_and_leaves_nothing() -> None:
    turns = Turns()
    groups = [turns.add("a") for _ in range(1000)]
    turns.add("b")
    for group in groups[:990]:
        turns.leave(group)
        turns.queue.close(group)
    account = groups[-1].account
    assert account is not None
    assert len(account.heap) < 50, "husks pile up"
    assert turns.names(3) == "aba"


def test_accounts_do_not_pile_up() -> None:
    """Each request comes from another tenant, as end users are, while one tenant always waits."""
    turns = Turns()
    for _ in range(3):
        turns.add("always")
    (level,) = turns.queue._levels.values()
    for index in range(5000):
        group = turns.add(f"user {index}")
        turns.add("always")
        turns.queue.close(turns.take())
        turns.queue.close(turns.take())
        assert group.account is None or group.account.num_served <= 10 * (index + 1)
    assert len(level.accounts) <= 2 * LEAST_IDLE_ACCOUNTS + 4
    while turns.queue.first is not None:
        turns.queue.close(turns.take())
    assert turns.queue._levels == {}


def test_new_tenants_without_an_end_keep_nobody_out() -> None:
    """There are always ten who were never served. One who was waits until they have had as much, and not for ever; nor
    are those remembered who had their turn."""
    turns = Turns()
    turns.add("back")
    for index in range(10):
        turns.add(f"user {index}")
    turns.take(500)
    turns.add("back")
    (level,) = turns.queue._levels.values()
    for index in range(10, 1000):
        turns.add(f"user {index}")
        group = turns.take(50)
        turns.queue.close(group)
        if group.request.tenant == "back":
            break
    assert 100 <= index < 150
    for index in range(1000, 5000):
        turns.add(f"user {index}")
        turns.queue.close(turns.take(50))
    assert len(level.accounts) <= 2 * LEAST_IDLE_ACCOUNTS


def test_priorities_that_come_and_go_leave_nothing() -> None:
    turns = Turns()
    turns.add("a", 0)
    for index in range(1000):
        group = turns.add("b", 1 + index % 2)
        turns.leave(group)
        turns.queue.close(group)
    assert sorted(turns.queue._priorities) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_tenants_with_a_backlog_are_served_alike(seed: int) -> None:
    """Through the scheduler: three tenants keep requests waiting, of lengths that differ by tenant. At any time nobody
    is ahead by more than twice the larger of the longest prompt and the output of a full batch."""
    rng = random.Random(seed)
    lengths = {"short": (3, 2), "long": (40, 6), "talker": (4, 30)}
    limits = make_limits(num_blocks=100, max_num_seqs=4)
    harness = Harness(limits)
    served: Counter[str] = Counter()
    num_waiting = Counter(dict.fromkeys(lengths, 0))
    count = itertools.count()

    def refill() -> None:
        waiting = Counter(s.group.request.tenant for s in harness.scheduler.waiting if not s.group.is_admitted)
        for tenant, (num_prompt, max_tokens) in lengths.items():
            for _ in range(3 - waiting[tenant]):
                harness.add(
                    make_request(
                        f"{tenant}{next(count)}",
                        num_prompt=rng.randint(1, num_prompt),
                        max_tokens=rng.randint(1, max_tokens),
                        tenant=tenant,
                    )
                )

    most = 2 * max(40, limits.max_num_seqs * 30)
    for _ in range(600):
        refill()
        num_waiting.clear()
        before = {group: group.is_admitted for group in harness.groups.values() if group.num_unfinished}
        events = len(harness.events)
        harness.step()
        for group, was_admitted in before.items():
            if group.is_admitted and not was_admitted:
                served[group.request.tenant] += len(group.request.prompt_token_ids)
        for event in harness.events[events:]:
            served[event.sequence.group.request.tenant] += 1  # type: ignore[union-attr]
        assert max(served.values()) - min(served[tenant] for tenant in lengths) <= most, served
    assert min(served.values()) > 1000


def test_a_preempted_request_goes_before_fresh_ones_of_whoever_was_served_less() -> None:
    harness = Harness(make_limits(num_blocks=4))
    harness.add(make_request("A", num_prompt=6, max_tokens=7, tenant="a"))
    harness.add(make_request("B", num_prompt=4, max_tokens=6, tenant="a"))
    while harness.scheduler.num_preemptions == 0:
        harness.step()
    harness.add(make_request("C", num_prompt=4, max_tokens=6, tenant="c"))
    first = harness.scheduler.waiting.first
    assert first is not None
    assert first.group is harness.groups["B"]
    harness.run()
