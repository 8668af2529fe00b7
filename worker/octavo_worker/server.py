"""The worker's gRPC server: `WorkerService`, health and reflection.

It joins streams to the executor's thread and keeps nothing itself: rules are in `session`, work in `executor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc as pb_grpc
from octavo_worker.executor import Executor, PlanError
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.session import Lease, Session, SessionError
from octavo_worker.step import Step
from octavo_worker.step_pipeline import StepPipeline
from octavo_worker.tokenizer import TokenizerBundle

_log = logging.getLogger(__name__)
SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
PIECE_BYTES = 1 << 20
PROGRESS_S = 1.0


class _End(Exception):
    """The stream is over: the router closed its side (code OK), or something went wrong."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """Serves one executor. description: Describe's answer without `last_epoch`.

    device_failed: set once the device does not answer any more, which only another process can mend.
    """

    def __init__(
        self,
        executor: Executor,
        thread: ExecutorThread,
        lease: Lease,
        description: pb.DescribeResponse,
        tokenizer: TokenizerBundle,
    ) -> None:
        self._executor, self._thread, self._lease = executor, thread, lease
        self._pipeline = StepPipeline(thread)
        self._description, self._tokenizer = description, tokenizer
        self._outboxes: set[_Outbox] = set()
        self._stopping = False
        self.device_failed = asyncio.Event()

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.DescribeResponse:
        answer = pb.DescribeResponse()
        answer.CopyFrom(self._description)
        answer.last_epoch = self._lease.last_epoch
        return answer

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: object
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        yield pb.GetTokenizerResponse(defaults=self._tokenizer.defaults)
        content = self._tokenizer.tokenizer_json
        for start in range(0, len(content), PIECE_BYTES):
            yield pb.GetTokenizerResponse(tokenizer_json=content[start : start + PIECE_BYTES])

    async def Run(
        self, requests: AsyncIterator[pb.RunRequest], context: grpc.aio.ServicerContext[pb.RunRequest, pb.RunResponse]
    ) -> AsyncIterator[pb.RunResponse]:
        try:
            session = await self._open(requests)
        except _End as end:
            await context.abort(end.code, end.message)
        _log.info("session of router %r opened, epoch %d", session.router_name, session.epoch)
        resetting = self._reset()
        outbox = _Outbox()
        self._outboxes.add(outbox)
        reader = asyncio.create_task(self._read(requests, session, outbox))
        ticker = asyncio.create_task(self._tick(outbox))
        try:
            await _begun(resetting)
            yield session.opened()
            while True:
                item = await outbox.get()
                yield session.progress(self._thread.tick, self._thread.busy) if item is None else session.answer(item)
        except _End as end:
            _log.info("session of router %r ended, epoch %d: %s", session.router_name, session.epoch, end.message)
            reader.cancel()  # else it would fail on the stream's end, which is no news
            if end.code is not grpc.StatusCode.OK:
                await context.abort(end.code, end.message)
        except (asyncio.CancelledError, GeneratorExit):
            _log.info("session of router %r ended, epoch %d: the router is gone", session.router_name, session.epoch)
            raise
        finally:
            if self._lease.end(session):
                self._reset()  # else a successor holds it, and has reset before it began
            self._outboxes.discard(outbox)
            reader.cancel()
            ticker.cancel()

    def _reset(self) -> asyncio.Future[None]:
        """Has the executor begin anew, behind whatever it is in. A device that cannot is told of in `device_failed`."""
        resetting = asyncio.wrap_future(self._thread.submit(self._executor.reset))
        resetting.add_done_callback(self._note_reset)
        return resetting

    def _note_reset(self, resetting: asyncio.Future[None]) -> None:
        if not resetting.cancelled() and (error := resetting.exception()) is not None:
            _log.error("the device failed; this process cannot go on", exc_info=error)
            self.device_failed.set()

    def stop(self) -> None:
        """Ends all sessions with UNAVAILABLE and takes no new ones."""
        self._stopping = True
        for outbox in self._outboxes:
            outbox.end(grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")

    async def _open(self, requests: AsyncIterator[pb.RunRequest]) -> Session:
        """Waits for the first message and opens a session. Raises _End when there is none or it may not open."""
        if self._stopping:
            raise _End(grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")
        try:
            async with asyncio.timeout(self._lease.lease_s):
                request = await anext(requests)
            return self._lease.open(request, time.monotonic())
        except (TimeoutError, StopAsyncIteration):
            raise _End(grpc.StatusCode.FAILED_PRECONDITION, "the first message of a session must be `open`") from None
        except SessionError as error:
            _log.warning("session refused: %s", error)
            raise _End(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    async def _read(self, requests: AsyncIterator[pb.RunRequest], session: Session, outbox: _Outbox) -> None:
        """Hands messages to the executor until the stream ends, one does not fit, or the lease lapses."""
        watch = asyncio.create_task(self._watch(session, outbox))
        try:
            async for request in requests:
                session.accept(request, time.monotonic())
                self._order(request, session, outbox)
            self._thread.submit(lambda: None).add_done_callback(
                outbox.threadsafe(lambda _: outbox.end(grpc.StatusCode.OK, "the router closed the stream"))
            )
        except SessionError as error:
            session.closed = True
            outbox.end(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Exception as error:  # whatever it is, the stream must not go on without its reader
            _log.exception("reading from router %r failed", session.router_name)
            session.closed = True
            outbox.end(grpc.StatusCode.INTERNAL, f"reading failed: {error}")
        finally:
            watch.cancel()  # who has closed its side is not silent, but done

    async def _watch(self, session: Session, outbox: _Outbox) -> None:
        """Ends a session when its lease has lapsed."""
        left_s = self._lease.lease_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = session.heard_at + self._lease.lease_s - time.monotonic()
        session.close()
        silence = f"nothing was heard of router {session.router_name!r} for {self._lease.lease_s:g} s"
        outbox.end(grpc.StatusCode.FAILED_PRECONDITION, f"the lease lapsed: {silence}")

    def _order(self, request: pb.RunRequest, session: Session, outbox: _Outbox) -> None:
        """Puts a message's work into the executor's queue."""
        body = request.WhichOneof("body")
        if body == "sequence_tokens":
            piece = request.sequence_tokens
            self._thread.submit(
                lambda: None if session.closed else self._executor.add_tokens(piece.sequence_id, piece.token_ids)
            )
        elif body == "plan":
            future = self._pipeline.submit(lambda: self._begin(request.plan, session), session.close)
            future.add_done_callback(outbox.threadsafe(lambda done: _deliver(done, outbox)))

    def _begin(self, plan: pb.StepPlan, session: Session) -> Step:
        """Runs in the executor's thread."""
        if session.closed:
            raise _End(grpc.StatusCode.CANCELLED, "the session has ended")
        return self._executor.begin(plan)

    async def _tick(self, outbox: _Outbox) -> None:
        """Asks for a progress message about once a second."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            outbox.put(None)


class _Outbox:
    """What is to be written to one stream: results, progress (None), and at last how it ends."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[pb.StepResult | _End | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, item: pb.StepResult | None) -> None:
        self._queue.put_nowait(item)

    def end(self, code: grpc.StatusCode, message: str) -> None:
        self._queue.put_nowait(_End(code, message))

    async def get(self) -> pb.StepResult | None:
        """The next item. Raises _End at the end."""
        item = await self._queue.get()
        if isinstance(item, _End):
            raise item
        return item

    def threadsafe(self, callback: Callable[[Future[Any]], None]) -> Callable[[Future[Any]], None]:
        """A callback for another thread that has `callback` called on this stream's event loop."""

        def call(future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the answer
                self._loop.call_soon_threadsafe(callback, future)

        return call


async def _begun(resetting: asyncio.Future[None]) -> None:
    """Waits until the executor has begun anew. Raises _End where the device has failed, so that a router finds out by
    the session and not by the first request."""
    try:
        await asyncio.shield(resetting)
    except Exception as error:
        raise _End(grpc.StatusCode.INTERNAL, f"the device failed: {type(error).__name__}: {error}") from None


def _deliver(done: Future[pb.StepResult], outbox: _Outbox) -> None:
    """Puts a finished plan's result, or how it failed, into the outbox."""
    error = done.exception()
    if error is None:
        outbox.put(done.result())
    elif isinstance(error, PlanError):
        outbox.end(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    elif isinstance(error, _End):
        outbox.end(error.code, error.message)
    else:
        _log.error("a step failed; the session ends", exc_info=error)
        outbox.end(grpc.StatusCode.INTERNAL, f"the step failed: {type(error).__name__}: {error}")


async def add_services(server: grpc.aio.Server, servicer: WorkerServicer) -> health.aio.HealthServicer:
    """Adds the worker's service, health (serving) and reflection. Returns the health service."""
    pb_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    for name in ("", SERVICE):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return health_servicer
