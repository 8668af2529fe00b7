from __future__ import annotations

import pytest

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.session import PROTOCOL_VERSION, Lease, Session, SessionError

INCARNATION = 0xABCDEF


@pytest.fixture
def lease() -> Lease:
    return Lease(INCARNATION, lease_s=10.0, max_plans_in_flight=2)


def opening(epoch: int, *, name: str = "router-a", version: int = PROTOCOL_VERSION, **header: int) -> pb.RunRequest:
    body = pb.OpenSession(protocol_version=version, router_name=name)
    return pb.RunRequest(**{"epoch": epoch, "incarnation": INCARNATION, "step_seq": 1, "open": body, **header})


def message(session: Session, step_seq: int, **body: object) -> pb.RunRequest:
    return pb.RunRequest(
        epoch=session.epoch, incarnation=INCARNATION, step_seq=step_seq, **(body or {"renew": pb.Renew()})
    )


def test_session_counts_steps(lease: Lease) -> None:
    session = lease.open(opening(3), 0.0)
    assert session.opened() == pb.RunResponse(epoch=3, incarnation=INCARNATION, step_seq=0, opened=pb.SessionOpened())
    session.accept(message(session, 1), 1.0)
    session.accept(message(session, 1, sequence_tokens=pb.SequenceTokens(sequence_id=1)), 1.0)
    session.accept(message(session, 1, plan=pb.StepPlan()), 1.0)
    session.accept(message(session, 2, plan=pb.StepPlan()), 1.0)
    assert session.progress(5, True).step_seq == 0
    assert session.answer(pb.StepResult(idle_us=4)).step_seq == 1
    assert session.progress(6, False).step_seq == 1
    session.accept(message(session, 3, plan=pb.StepPlan()), 1.0)
    assert lease.last_epoch == 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epoch": 4}, "of epoch 4, the session of epoch 3"),
        ({"incarnation": 1}, "is for incarnation 0000000000000001; this worker is 0000000000abcdef"),
        ({"step_seq": 2}, "step_seq 2; expected was 1"),
        ({"step_seq": 0}, "step_seq 0; expected was 1"),
        ({"open": pb.OpenSession()}, "open already"),
    ],
)
def test_message_that_does_not_fit(lease: Lease, changes: dict[str, object], text: str) -> None:
    session = lease.open(opening(3), 0.0)
    request = message(session, 1)
    for name, value in changes.items():
        getattr(request, name).CopyFrom(value) if name == "open" else setattr(request, name, value)
    with pytest.raises(SessionError, match=text):
        session.accept(request, 1.0)


def test_message_without_a_body(lease: Lease) -> None:
    session = lease.open(opening(3), 0.0)
    with pytest.raises(SessionError, match="no body"):
        session.accept(pb.RunRequest(epoch=3, incarnation=INCARNATION, step_seq=1), 0.0)


def test_too_many_plans_in_flight(lease: Lease) -> None:
    session = lease.open(opening(1), 0.0)
    for step in (1, 2):
        session.accept(message(session, step, plan=pb.StepPlan()), 0.0)
    with pytest.raises(SessionError, match="plan 3 came while 2 plans were not answered; this worker takes 2"):
        session.accept(message(session, 3, plan=pb.StepPlan()), 0.0)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.RunRequest(epoch=1, incarnation=INCARNATION, step_seq=1, renew=pb.Renew()), "must be `open`"),
        (opening(1, version=9), "speaks protocol version 9, this worker 1"),
        (opening(1, incarnation=5), "is for incarnation 0000000000000005"),
        (opening(1, step_seq=2), "`open` has step_seq 2"),
        (opening(0), "epoch 0 is not higher than 0"),
    ],
)
def test_sessions_that_may_not_open(lease: Lease, request_: pb.RunRequest, text: str) -> None:
    with pytest.raises(SessionError, match=text):
        lease.open(request_, 0.0)
    assert lease.last_epoch == 0


def test_one_router_at_a_time(lease: Lease) -> None:
    first = lease.open(opening(1), 0.0)
    with pytest.raises(SessionError, match="router 'router-a' holds this worker's lease"):
        lease.open(opening(2, name="router-b"), 9.0)
    first.accept(message(first, 1), 9.5)
    with pytest.raises(SessionError, match="holds this worker's lease"):
        lease.open(opening(2, name="router-b"), 19.0)
    assert lease.end(first)
    second = lease.open(opening(2, name="router-b"), 19.0)
    assert first.closed
    assert not lease.end(first)  # ending it again does not end its successor
    assert not second.closed
    lease.end(second)
    with pytest.raises(SessionError, match="epoch 2 is not higher than 2"):
        lease.open(opening(2), 20.0)


def test_silent_router_loses_the_lease(lease: Lease) -> None:
    first = lease.open(opening(1), 0.0)
    assert not lease.lapsed(first, 10.0)
    assert lease.lapsed(first, 10.1)
    first.close()
    first.accept(message(first, 1, renew=pb.Renew()), 10.1)  # too late, and no renewal
    assert lease.lapsed(first, 10.1)
    second = lease.open(opening(2, name="router-b"), 10.1)
    assert first.closed
    assert not lease.end(first)
    assert not second.closed
