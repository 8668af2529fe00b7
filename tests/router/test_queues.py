"""The queues: order by priority, then arrival, then sample, whoever comes and leaves."""

from __future__ import annotations

import random

from octavo_router.queues import RunningQueue, WaitingQueue
from octavo_router.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.router.harness import EOS, make_request


def sequences(arrival: int, *, priority: int = 0, n: int = 1) -> list[Sequence]:
    request = make_request(str(arrival), priority=priority, n=n)
    return SequenceGroup(request, arrival=arrival, first_sequence_id=10 * arrival, eos_token_ids=EOS, now=0.0).sequences


def drained(queue: WaitingQueue) -> list[int]:
    ids = []
    while (first := queue.first) is not None:
        ids.append(first.sequence_id)
        queue.remove(first)
    return ids


def test_waiting_is_by_priority_then_arrival_then_sample() -> None:
    queue = WaitingQueue()
    for sequence in [*sequences(2), *sequences(1, n=2), *sequences(3, priority=-1), *sequences(0, priority=1)]:
        queue.add(sequence)
    assert len(queue) == 5
    assert drained(queue) == [30, 10, 11, 20, 0]
    assert len(queue) == 0


def test_a_preempted_sequence_has_its_old_place() -> None:
    queue = WaitingQueue()
    (old,) = sequences(1)
    for arrival in (2, 3):
        queue.add(sequences(arrival)[0])
    old.status = SequenceStatus.PREEMPTED
    queue.add(old)
    assert queue.first is old
    assert queue.num_preempted == 1
    queue.remove(old)
    assert queue.num_preempted == 0


def test_leaving_from_the_middle_leaves_nothing_behind() -> None:
    queue = WaitingQueue()
    members = [sequences(arrival)[0] for arrival in range(1000)]
    for member in members:
        queue.add(member)
    random.Random(1).shuffle(members)
    for member in members[:990]:
        queue.remove(member)
    (account,) = {member.group.account for member in members}
    assert account is not None
    assert len(account.heap) < 50, "husks pile up"
    assert drained(queue) == sorted(member.sequence_id for member in members[990:])


def test_others_pass_who_is_parked_until_it_is_woken() -> None:
    queue = WaitingQueue()
    members = [sequences(arrival)[0] for arrival in range(4)]
    for member in members:
        queue.add(member)
    queue.park(members[0], b"hash")
    queue.park(members[1], 7)
    assert (queue.first, len(queue), queue.num_parked) == (members[2], 4, 2)
    queue.wake(b"another")
    assert queue.first is members[2]
    queue.wake(b"hash")
    assert (queue.first, queue.num_parked) == (members[0], 1)
    queue.remove(members[1])
    assert queue.num_parked == 0
    queue.wake(7)
    assert drained(queue) == [0, 20, 30]


def test_everyone_can_be_woken_and_who_is_parked_is_no_husk() -> None:
    queue = WaitingQueue()
    members = [sequences(arrival)[0] for arrival in range(100)]
    for member in members:
        queue.add(member)
    for member in members[:10]:
        queue.park(member, member.sequence_id)
    for member in members[20:]:
        queue.remove(member)
    assert queue.first is members[10]
    queue.wake_all()
    assert drained(queue) == [member.sequence_id for member in members[:20]]


def test_running_is_in_order() -> None:
    queue = RunningQueue()
    members = [sequences(arrival)[0] for arrival in range(50)]
    random.Random(1).shuffle(members)
    for member in members:
        queue.add(member)
    for member in members[:25]:
        queue.remove(member)
    assert [member.sequence_id for member in queue] == sorted(member.sequence_id for member in members[25:])
    assert len(queue) == 25
