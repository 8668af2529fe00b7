"""One HTTP exchange below the routes: a body with a limit, an answer that ends with its client, a stream of events.

Knows ASGI, requests of the contract and answers; which route takes which body is `http_server.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError, RequestCancelledError, RequestTooLargeError
from octavo.v1 import inference_pb2 as pb
from octavo_router.http_errors import error_body, error_response, internal_error
from octavo_router.inference import Inference

T = TypeVar("T")

_FEW_ENTRIES = 256

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold events back until its buffer is full.
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(RequestCancelledError):
    """The client closed its connection before the answer was complete."""

    def __init__(self) -> None:
        super().__init__("the client closed its connection")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body. Raises RequestTooLargeError for one above max_bytes, ClientGoneError for one that breaks off.

    As much again is read and dropped before that, since a client that is still sending would see a reset connection
    instead of the answer.
    """
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        size += len(message.get("body", b""))
        if size <= max_bytes:
            chunks.append(message.get("body", b""))
        else:
            chunks.clear()
        if size > 2 * max_bytes or not message.get("more_body", False):
            break
    if size > max_bytes:
        raise RequestTooLargeError(
            f"the body is larger than {max_bytes} bytes; send less, or start the router with more --max-request-bytes"
        )
    return b"".join(chunks)


class Answer(Protocol):
    """How one HTTP request is answered; its prompts' responses are numbered by `prompt_index`."""

    def whole(self, responses: Sequence[pb.GenerateResponse]) -> bytes:
        """The body of an answer that does not stream, from each prompt's only response."""

    def events(self, prompt_index: int, response: pb.GenerateResponse) -> bytes:
        """The events that a response of a stream gives. May be none."""

    def last_events(self) -> bytes:
        """The events that end a stream whose requests have all ended well."""

    def failure_events(self, error_body: bytes) -> bytes:
        """The events that end a stream which failed after it had begun. error_body: the error as JSON."""

    def param_of(self, field: str) -> str:
        """The name in the HTTP request of a field of the contract."""


@dataclass(frozen=True)
class Exchange:
    """What one HTTP request asks: its prompts' requests, and how to answer them."""

    requests: Sequence[pb.GenerateRequest]
    answer: Answer
    stream: bool


class GenerationResponse(Response):
    """The response to an exchange. Generates while it is sent, and stops the moment its client is gone.

    The status line of a stream waits for the first token, so that what fails before it is an error status.
    """

    def __init__(self, inference: Inference, exchange: Exchange) -> None:
        super().__init__()
        self._inference = inference
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGoneError):
            await while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = _EventWriter(send)
        try:
            async with contextlib.AsyncExitStack() as stack:
                sources = [
                    await stack.enter_async_context(contextlib.aclosing(self._inference.generate(request)))
                    for request in self._exchange.requests
                ]
                # Every prompt is accepted, or none is answered.
                firsts = await _together([_first(source) for source in sources])
                if not self._exchange.stream:
                    body = await _written(firsts, lambda: self._exchange.answer.whole(firsts))
                    response = Response(body, media_type="application/json")
                    await response(scope, receive, send)
                    return
                await _together(
                    [
                        self._stream(index, first, source, events)
                        for index, (first, source) in enumerate(zip(firsts, sources, strict=True))
                    ]
                )
                await events.end(self._exchange.answer.last_events())
        except Exception as exception:
            error = exception if isinstance(exception, OctavoError) else internal_error(exception)
            answer = self._exchange.answer
            if events.begun:
                await events.end(answer.failure_events(error_body(error, answer.param_of)))
            else:
                await error_response(error, answer.param_of)(scope, receive, send)

    async def _stream(
        self,
        index: int,
        first: pb.GenerateResponse,
        source: AsyncGenerator[pb.GenerateResponse, None],
        events: _EventWriter,
    ) -> None:
        pending = await _written([first], lambda: self._exchange.answer.events(index, first))
        async for response in source:
            await events.write(pending + self._exchange.answer.events(index, response))
            pending = b""


class _EventWriter:
    """Writes server-sent events; the response begins with the first."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def write(self, events: bytes) -> None:
        """Sends events, waiting while the client reads too slowly. Nothing for none."""
        if events:
            await self._write(events, more=True)

    async def end(self, events: bytes) -> None:
        """Sends the last events and ends the response."""
        await self._write(events, more=False)

    async def _write(self, events: bytes, *, more: bool) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": more})


async def _written(firsts: Sequence[pb.GenerateResponse], write: Callable[[], bytes]) -> bytes:
    """What `write` makes of first responses: in a thread where it is much, since log-probabilities of a long prompt
    take longer than the event loop should wait."""
    num_entries = sum(len(first.prompt.logprobs) for first in firsts)
    return write() if num_entries <= _FEW_ENTRIES else await asyncio.to_thread(write)


async def _first(source: AsyncGenerator[pb.GenerateResponse, None]) -> pb.GenerateResponse:
    return await anext(source)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled at once when the client goes away; then raises ClientGoneError.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of works that run at the same time. The first error cancels the others and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
