"""The rules of sessions: who may order plans, in which order, and when that ends.

A worker serves one router at a time. A session holds the lease until its stream ends or nothing was heard for
`lease_s`. Every message carries epoch, incarnation and step number, and one that does not fit ends the session.
Nothing here knows of gRPC's streams, threads or clocks: time is an argument.
"""

from __future__ import annotations

from octavo.worker.v1 import worker_pb2 as pb

PROTOCOL_VERSION = 1


class SessionError(Exception):
    """A message breaks the rules; the session ends with FAILED_PRECONDITION and this text."""


class Session:
    """One router's session, from its `open` message on.

    executed_step: the last plan that was executed. closed: nothing of it is executed any more.
    """

    def __init__(self, epoch: int, incarnation: int, router_name: str, max_plans_in_flight: int, now: float) -> None:
        self.epoch, self.incarnation, self.router_name = epoch, incarnation, router_name
        self.executed_step = 0
        self.closed = False
        self.heard_at = now
        self.plans_in_flight = 0
        self._max_plans_in_flight = max_plans_in_flight
        self._next_step = 1

    def close(self) -> None:
        """Nothing of it is executed from here on: not even a plan that waits already."""
        self.closed = True

    def accept(self, request: pb.RunRequest, now: float) -> None:
        """Takes a message into account. Raises SessionError when it does not fit."""
        self._check_header(request)
        if not self.closed:  # a lease that has lapsed does not come back
            self.heard_at = now
        body = request.WhichOneof("body")
        if body == "open":
            raise SessionError("the session is open already; `open` comes first, and once")
        if body is None:
            raise SessionError("the message has no body that this worker knows")
        if body == "plan":
            if self.plans_in_flight >= self._max_plans_in_flight:
                raise SessionError(
                    f"plan {request.step_seq} came while {self.plans_in_flight} plans were not answered; "
                    f"this worker takes {self._max_plans_in_flight}"
                )
            self.plans_in_flight += 1
            self._next_step += 1

    def _check_header(self, request: pb.RunRequest) -> None:
        if request.epoch != self.epoch:
            raise SessionError(f"the message is of epoch {request.epoch}, the session of epoch {self.epoch}")
        _check_incarnation(request, self.incarnation)
        if request.step_seq != self._next_step:
            raise SessionError(f"the message has step_seq {request.step_seq}; expected was {self._next_step}")

    def answer(self, result: pb.StepResult) -> pb.RunResponse:
        """The response that answers the oldest plan in flight."""
        self.plans_in_flight -= 1
        self.executed_step += 1
        return self._response(result=result)

    def opened(self) -> pb.RunResponse:
        """The session's first response."""
        return self._response(opened=pb.SessionOpened())

    def progress(self, tick: int, busy: bool) -> pb.RunResponse:
        """A response that tells that the executor lives."""
        return self._response(progress=pb.Progress(executor_tick=tick, busy=busy))

    def _response(
        self,
        *,
        opened: pb.SessionOpened | None = None,
        result: pb.StepResult | None = None,
        progress: pb.Progress | None = None,
    ) -> pb.RunResponse:
        return pb.RunResponse(
            epoch=self.epoch,
            incarnation=self.incarnation,
            step_seq=self.executed_step,
            opened=opened,
            result=result,
            progress=progress,
        )


class Lease:
    """Gives the worker to one session at a time.

    last_epoch: the highest epoch of any session so far; a new session's must be higher.
    """

    def __init__(self, incarnation: int, lease_s: float, max_plans_in_flight: int) -> None:
        self.incarnation, self.lease_s = incarnation, lease_s
        self.last_epoch = 0
        self._max_plans_in_flight = max_plans_in_flight
        self._holder: Session | None = None

    def open(self, request: pb.RunRequest, now: float) -> Session:
        """Starts a session from its first message. Raises SessionError when it may not start.

        A holder that was silent for longer than its lease is closed.
        """
        if request.WhichOneof("body") != "open":
            raise SessionError("the first message of a session must be `open`")
        version = request.open.protocol_version
        if version != PROTOCOL_VERSION:
            raise SessionError(f"the router speaks protocol version {version}, this worker {PROTOCOL_VERSION}")
        _check_incarnation(request, self.incarnation)
        if request.step_seq != 1:
            raise SessionError(f"`open` has step_seq {request.step_seq}; the session's first plan is 1")
        holder = self._holder
        if holder is not None and not self.lapsed(holder, now):
            raise SessionError(
                f"router {holder.router_name!r} holds this worker's lease (epoch {holder.epoch}); "
                f"it ends with its stream, or after {self.lease_s:g} s of silence"
            )
        if request.epoch <= self.last_epoch:
            raise SessionError(f"epoch {request.epoch} is not higher than {self.last_epoch}, the highest so far")
        if holder is not None:
            holder.closed = True
        self.last_epoch = request.epoch
        self._holder = Session(
            request.epoch, self.incarnation, request.open.router_name, self._max_plans_in_flight, now
        )
        return self._holder

    def lapsed(self, session: Session, now: float) -> bool:
        """Whether nothing was heard of a session for longer than its lease."""
        return now - session.heard_at > self.lease_s

    def end(self, session: Session) -> bool:
        """Ends a session. Returns whether it held the lease, which it does not if it has ended or was taken over."""
        session.closed = True
        if self._holder is not session:
            return False
        self._holder = None
        return True


def _check_incarnation(request: pb.RunRequest, incarnation: int) -> None:
    if request.incarnation != incarnation:
        raise SessionError(
            f"the message is for incarnation {request.incarnation:016x}; this worker is {incarnation:016x}"
        )
