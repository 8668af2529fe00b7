"""The seam to a worker, and its gRPC implementation: plans go out, results come in.

Keeps the stream alive and says when it is lost. The messages are `worker_messages.py`'s. What to send, and what to do
after a loss, is the engine's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from octavo.authentication import METADATA_KEY, bearer
from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc
from octavo_router.plan import StepPlan, StepResult
from octavo_router.request import Sampling
from octavo_router.worker_messages import pieces_ahead, plan_message, result_columns

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
UNARY_TIMEOUT_S = 10.0
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0
# Asking whether there is a worker costs next to nothing, and what this adds to a start or a failover users wait for.
LONGEST_WAIT_S = 0.2
REMINDER_S = 10.0

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A worker that vanished without a word is noticed within 20 s, idle or not, and no number of pings is too many.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker that is back is found at once: no long back-off, and none shared with another channel to its address.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class WorkerUnavailableError(Exception):
    """No worker answers, or one that cannot be talked to."""


class SessionLostError(Exception):
    """The session ended, or could not be opened; nothing that was sent on it can be relied on."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a worker sends of its model's tokenizer: a tokenizer.json and what belongs to it."""

    tokenizer_json: bytes
    defaults: pb.TokenizerDefaults

    @property
    def default_sampling(self) -> Sampling:
        """How the model wants to be sampled where a request does not say."""
        named = ("temperature", "top_p", "top_k")
        return Sampling(**{name: getattr(self.defaults, name) for name in named if self.defaults.HasField(name)})


@dataclass(frozen=True, slots=True)
class Progress:
    """The executor lives: its tick grows whenever it gets on, within a step too."""

    executor_tick: int
    busy: bool


class WorkerSession(Protocol):
    """An open session. Every method raises SessionLostError once it is lost."""

    async def send(self, plan: StepPlan) -> None:
        """Sends a plan; it is on its way when this returns. Plans arrive in the order of the calls."""

    async def renew(self) -> None:
        """Tells the worker that the router lives."""

    def messages(self) -> AsyncGenerator[StepResult | Progress]:
        """What the worker says, in order, without end."""


class WorkerClient(Protocol):
    """One worker, reached or not."""

    @property
    def address(self) -> str:
        """Where it is reached, for people."""

    async def describe(self) -> pb.DescribeResponse:
        """What the worker is. Raises WorkerUnavailableError."""

    async def get_tokenizer(self) -> TokenizerFiles:
        """The model's tokenizer. Raises WorkerUnavailableError."""

    def open_session(
        self, *, epoch: int, incarnation: int, router_name: str
    ) -> AbstractAsyncContextManager[WorkerSession]:
        """A session, which ends with the context. Raises SessionLostError."""

    async def close(self) -> None:
        """Lets go of the connection."""


class GrpcWorkerClient:
    """A worker at HOST:PORT or unix:PATH. To be made where an event loop runs."""

    def __init__(self, address: str, *, token: str = "", credentials: grpc.ChannelCredentials | None = None) -> None:
        """token: what the worker knows its router by; empty for none. credentials: of a connection over TLS, where the
        worker's certificate must be for the host of the address, or for localhost if it is a Unix socket.
        """
        self._address = address
        self._metadata = ((METADATA_KEY, bearer(token)),) if token else ()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            name = [("grpc.ssl_target_name_override", "localhost")] if address.startswith("unix:") else []
            self._channel = grpc.aio.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, *name])
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    @property
    def address(self) -> str:
        return self._address

    async def describe(self) -> pb.DescribeResponse:
        try:
            description = await self._stub.Describe(
                pb.DescribeRequest(), timeout=UNARY_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise WorkerUnavailableError(_explain(error)) from error
        if description.protocol_version != PROTOCOL_VERSION:
            raise WorkerUnavailableError(
                f"it speaks version {description.protocol_version} of the worker protocol, this router speaks "
                f"{PROTOCOL_VERSION}; install the same release on both sides"
            )
        return description

    async def get_tokenizer(self) -> TokenizerFiles:
        defaults = pb.TokenizerDefaults()
        pieces: list[bytes] = []
        try:
            async for response in self._stub.GetTokenizer(pb.GetTokenizerRequest(), metadata=self._metadata):
                if response.WhichOneof("piece") == "defaults":
                    defaults = response.defaults
                else:
                    pieces.append(response.tokenizer_json)
        except grpc.aio.AioRpcError as error:
            raise WorkerUnavailableError(_explain(error)) from error
        return TokenizerFiles(b"".join(pieces), defaults)

    @asynccontextmanager
    async def open_session(self, *, epoch: int, incarnation: int, router_name: str) -> AsyncGenerator[WorkerSession]:
        call = self._stub.Run(metadata=self._metadata)
        session = _GrpcWorkerSession(call, epoch=epoch, incarnation=incarnation)
        try:
            await session.open(router_name)
            yield session
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


class _GrpcWorkerSession:
    """One Run call."""

    def __init__(self, call: Any, *, epoch: int, incarnation: int) -> None:
        self._call = call
        self._epoch = epoch
        self._incarnation = incarnation
        self._next_step_seq = 1
        self._writing = asyncio.Lock()

    async def open(self, router_name: str) -> None:
        """Opens the session and waits until the worker says that it is open."""
        opening = pb.OpenSession(protocol_version=PROTOCOL_VERSION, router_name=router_name)
        try:
            async with asyncio.timeout(UNARY_TIMEOUT_S):
                await self._write(self._request(open=opening))
                response = await self._read()
        except TimeoutError:
            raise SessionLostError(f"the worker did not open a session within {UNARY_TIMEOUT_S:g} s") from None
        if response.WhichOneof("body") != "opened":
            raise SessionLostError(f"the worker's first message is {response.WhichOneof('body')}, not opened")

    async def send(self, plan: StepPlan) -> None:
        async with self._writing:
            for new in plan.new_sequences:
                for piece in pieces_ahead(new):
                    await self._write(self._request(sequence_tokens=piece))
            await self._write(self._request(plan=plan_message(plan)))
            self._next_step_seq = plan.step_seq + 1

    async def renew(self) -> None:
        async with self._writing:
            await self._write(self._request(renew=pb.Renew()))

    async def messages(self) -> AsyncGenerator[StepResult | Progress]:
        while True:
            response = await self._read()
            if (response.epoch, response.incarnation) != (self._epoch, self._incarnation):
                logger.warning("dropped a message of epoch %d, which is not this session's", response.epoch)
                continue
            match response.WhichOneof("body"):
                case "result":
                    yield result_columns(response)
                case "progress":
                    yield Progress(response.progress.executor_tick, response.progress.busy)
                case other:
                    raise SessionLostError(f"the worker sent {other} within a session")

    def _request(self, **body: Any) -> pb.RunRequest:
        return pb.RunRequest(epoch=self._epoch, incarnation=self._incarnation, step_seq=self._next_step_seq, **body)

    async def _write(self, request: pb.RunRequest) -> None:
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise SessionLostError(await self._why(error)) from error

    async def _read(self) -> pb.RunResponse:
        try:
            response = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise SessionLostError(await self._why(error)) from error
        if response is grpc.aio.EOF:
            raise SessionLostError("the worker ended the session")
        return response  # type: ignore[no-any-return]

    async def _why(self, error: Exception) -> str:
        if isinstance(error, grpc.aio.AioRpcError):
            return _explain(error)
        return f"{(await self._call.code()).name}: {await self._call.details()}"


async def wait_for_worker(worker: WorkerClient) -> pb.DescribeResponse:
    """Asks the worker what it is until it answers. Logs that it waits, and why, and again every 10 s or for a new
    reason."""
    loop = asyncio.get_running_loop()
    began = last_logged = loop.time()
    reason = ""
    for delay_s in backoff(LONGEST_WAIT_S):
        try:
            return await worker.describe()
        except WorkerUnavailableError as error:
            now = loop.time()
            if str(error) != reason or now - last_logged >= REMINDER_S:
                reason, last_logged = str(error), now
                # Where both start together the worker, which has a model to load, comes second: that is no warning.
                level = logging.WARNING if now - began >= REMINDER_S else logging.INFO
                logger.log(level, "waiting for the worker at %s (%.0f s): %s", worker.address, now - began, reason)
        await asyncio.sleep(delay_s)
    raise AssertionError("backoff has no end")


def backoff(longest_s: float = LONGEST_DELAY_S) -> Iterator[float]:
    """Delays between tries, in seconds: doubling, with an upper bound, without end."""
    delay_s = FIRST_DELAY_S
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, longest_s)


def _explain(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
