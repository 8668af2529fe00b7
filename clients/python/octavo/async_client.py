"""The asynchronous client of a running server; the same methods as `Client`, to be awaited.

Belongs to the event loop it is first used in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2

from octavo.channel import DEFAULT_ADDRESS, Access, AccessOptions, check_address, health_method, says_serving
from octavo.conversion import chat_request, detokenize_request, generate_request, tokenize_request
from octavo.errors import RequestCancelledError
from octavo.output_builder import OutputBuilder
from octavo.resumption import DEFAULT_RESUME_TIMEOUT_S, Resumption, is_accepted
from octavo.status import error_of
from octavo.types import ChatOptions, Message, OutputDelta, Prompt, RequestOptions, RequestOutput, SamplingParams
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

_Request = TypeVar("_Request", bound=ProtoMessage)
_Response = TypeVar("_Response", bound=ProtoMessage)
_GenerateCall = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
_Start = Callable[[inference_pb2.GenerateRequest, float | None], _GenerateCall]


class AsyncGenerationStream(AsyncIterator[OutputDelta]):
    """A running generation: iterate for its deltas, or read `output` for all that has come so far.

    Goes on behind what has come where its server goes away and comes back. Closing it, leaving its `async with` block,
    cancelling the task that iterates or dropping it cancels the request on the server.
    """

    def __init__(self, start: _Start, builder: OutputBuilder, resumption: Resumption, address: str) -> None:
        self._start = start
        self._builder = builder
        self._resumption = resumption
        self._address = address
        self._ready: list[OutputDelta] = []
        self._closed = asyncio.Event()
        self._call = start(resumption.request(), resumption.timeout_s)

    @property
    def output(self) -> RequestOutput:
        """The answer as far as it has come."""
        return self._builder.output()

    @property
    def has_more_ready(self) -> bool:
        """Whether the next delta has come with the last one, in one response."""
        return bool(self._ready)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputDelta:
        """The next delta. Ends the iteration once closed; raises the server's error if the request fails."""
        while not self._ready:
            response = await self._read()
            if response is None:
                raise StopAsyncIteration
            self._ready = self._builder.add(response)[::-1]
        return self._ready.pop()

    async def _read(self) -> inference_pb2.GenerateResponse | None:
        """The next response; None at the end, or when `close` ends the wait."""
        try:
            while not self._closed.is_set():
                try:
                    response = await self._call.read()
                except grpc.aio.AioRpcError as error:
                    if not self._closed.is_set():
                        await self._recover(error)
                    continue
                if isinstance(response, inference_pb2.GenerateResponse):
                    self._resumption.progressed()
                    return response
                self._closed.set()
                self._builder.check_finished()
        except asyncio.CancelledError:
            # Either this task is cancelled, or another one called `close`, which cancels the call and so this read.
            if not self._closed.is_set() or _is_cancelling():
                self.close()
                raise
        return None

    async def _recover(self, error: grpc.aio.AioRpcError) -> None:
        """Sends the request again when it is time for that. Raises the error where it is the request's end."""
        if self._builder.is_finished:  # nothing was lost but the status behind the last response
            self._closed.set()
            return
        failure = error_of(error, self._address)
        delay = self._resumption.delay_after(failure, accepted=is_accepted(error.initial_metadata()))
        if delay is None:
            self._closed.set()
            raise failure from None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay)
        if not self._closed.is_set():
            self._call = self._start(self._resumption.request(), self._resumption.timeout_s)

    def close(self) -> None:
        """Cancels the request if it still runs. Idempotent."""
        self._closed.set()
        self._call.cancel()

    async def aclose(self) -> None:
        """As `close`; for contextlib.aclosing."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Calls the server at `address`, its gRPC address: HOST:PORT or unix:PATH. See `Client`, whose methods these
    are.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
        wait_for_server: bool = False,
        **access: Unpack[AccessOptions],
    ) -> None:
        self._access = Access.of(access)
        self._resume_timeout_s = resume_timeout_s
        self._wait_for_server = wait_for_server
        self._address = check_address(address)
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._address

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Generates to the end. Without `sampling_params` the model's defaults hold, up to the context's end."""
        return await self._finish(generate_request(prompt, sampling_params, options, final_only=True), options)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerationStream:
        """As `generate`, and yields what is new as it comes. Not a coroutine: `async for delta in
        client.stream(...)`.
        """
        return self._start(generate_request(prompt, sampling_params, options, final_only=False), options)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """Generates the next turn of a conversation to its end."""
        return await self._finish(chat_request(messages, sampling_params, options, final_only=True), options)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerationStream:
        """As `chat`, and yields what is new as it comes."""
        return self._start(chat_request(messages, sampling_params, options, final_only=False), options)

    async def tokenize(
        self,
        source: str | Sequence[Message],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        chat_options: ChatOptions | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of text, or of a conversation, rendered by the model's chat template as `chat_options` say."""
        request = tokenize_request(
            source, model=model, add_special_tokens=add_special_tokens, chat_options=chat_options
        )
        response = await self._call(self._inference().Tokenize, request, timeout)
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids. Bytes that are no whole character appear as U+FFFD."""
        request = detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        response = await self._call(self._inference().Detokenize, request, timeout)
        return response.text

    async def list_models(self, *, timeout: float | None = None) -> list[inference_pb2.Model]:
        """The served models, as the contract's messages: name, digest, max_model_len, vocab_size, has_chat_template."""
        response = await self._call(self._inference().ListModels, inference_pb2.ListModelsRequest(), timeout)
        return list(response.models)

    async def health(self, *, timeout: float | None = None) -> bool:
        """Whether the server takes requests. Raises UnavailableError where nobody answers."""
        method = health_method(self._open_channel())
        response = await self._call(method, health_pb2.HealthCheckRequest(), timeout)
        return says_serving(response)

    async def state(self, *, timeout: float | None = None) -> admin_pb2.GetStateResponse:
        """What the router's workers, queues and KV pools hold now, as the contract's message."""
        return await self._call(self._admin().GetState, admin_pb2.GetStateRequest(), timeout)

    async def drain(self, *, timeout: float | None = None) -> int:
        """Makes the server refuse new requests and finish the running ones. Returns how many have not ended yet."""
        response = await self._call(self._admin().Drain, admin_pb2.DrainRequest(), timeout)
        return response.request_count

    async def flush_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Makes the server forget every cached prefix, on both tiers. Returns how many blocks became free."""
        response = await self._call(self._admin().FlushPrefixCache, admin_pb2.FlushPrefixCacheRequest(), timeout)
        return response.block_count

    async def close(self) -> None:
        """Closes the connection; running requests are cancelled. Idempotent."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open_channel(self) -> grpc.aio.Channel:
        """The channel, made on first use: gRPC binds it to the event loop that runs then."""
        if self._closed:
            raise RequestCancelledError(f"the client for {self._address} is closed; make a new one")
        if self._channel is None:
            self._channel = self._access.aio_channel(self._address)
        return self._channel

    def _inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self._open_channel())

    def _admin(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        return admin_pb2_grpc.AdminServiceStub(self._open_channel())

    def _start(self, request: inference_pb2.GenerateRequest, options: RequestOptions) -> AsyncGenerationStream:
        builder = OutputBuilder(request)
        resumption = Resumption(
            request,
            builder,
            timeout_s=options.get("timeout"),
            resume_timeout_s=self._resume_timeout_s,
            wait_for_server=self._wait_for_server,
        )
        return AsyncGenerationStream(self._open, builder, resumption, self._address)

    def _open(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> _GenerateCall:
        return self._inference().Generate(request, timeout=timeout, metadata=self._access.metadata)

    async def _finish(self, request: inference_pb2.GenerateRequest, options: RequestOptions) -> RequestOutput:
        async with self._start(request, options) as stream:
            async for _ in stream:
                pass
            return stream.output

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        try:
            return await method(request, timeout=timeout, metadata=self._access.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._address) from None


def _is_cancelling() -> bool:
    """Whether somebody has asked the current task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
