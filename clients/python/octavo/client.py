"""The synchronous client of a running server. Safe to use from several threads.

What is said to the server and what is made of its answers is in `conversion`, `output_builder` and `status`, which the
asynchronous client shares; here is only the waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, cast

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2

from octavo.channel import DEFAULT_ADDRESS, Access, AccessOptions, check_address, health_method, says_serving
from octavo.conversion import chat_request, detokenize_request, generate_request, tokenize_request
from octavo.errors import OctavoError, RequestCancelledError
from octavo.output_builder import OutputBuilder
from octavo.resumption import DEFAULT_RESUME_TIMEOUT_S, Resumption, is_accepted
from octavo.status import FailedCall, error_of
from octavo.types import ChatOptions, Message, OutputDelta, Prompt, RequestOptions, RequestOutput, SamplingParams
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

_Request = TypeVar("_Request", bound=ProtoMessage)
_Response = TypeVar("_Response", bound=ProtoMessage)

if TYPE_CHECKING:  # the type is the stubs' own
    _GenerateCall = grpc._CallIterator[inference_pb2.GenerateResponse]
    _Start = Callable[[inference_pb2.GenerateRequest, float | None], _GenerateCall]


class GenerationStream(Iterator[OutputDelta]):
    """A running generation: iterate for its deltas, or read `output` for all that has come so far.

    Goes on behind what has come where its server goes away and comes back. Closing it, leaving its `with` block or
    dropping it cancels the request on the server.
    """

    def __init__(self, start: _Start, builder: OutputBuilder, resumption: Resumption, address: str) -> None:
        self._start = start
        self._builder = builder
        self._resumption = resumption
        self._address = address
        self._ready: list[OutputDelta] = []
        self._closed = threading.Event()
        self._call = start(resumption.request(), resumption.timeout_s)

    @property
    def output(self) -> RequestOutput:
        """The answer as far as it has come."""
        return self._builder.output()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> OutputDelta:
        """The next delta. Raises StopIteration at the end or once closed, and the server's error if the request
        fails.
        """
        while not self._ready:
            response = self._read()
            if response is None:
                raise StopIteration
            self._ready = self._builder.add(response)[::-1]
        return self._ready.pop()

    def _read(self) -> inference_pb2.GenerateResponse | None:
        """The next response; None at the end, or when another thread calls `close` meanwhile."""
        while not self._closed.is_set():
            try:
                response = next(self._call)
            except StopIteration:
                self._closed.set()
                self._builder.check_finished()
            except grpc.RpcError as error:
                if not self._closed.is_set():
                    self._recover(error_of(cast(FailedCall, error), self._address))
            else:
                self._resumption.progressed()
                return response
        return None

    def _recover(self, error: OctavoError) -> None:
        """Sends the request again when it is time for that. Raises the error where it is the request's end."""
        if self._builder.is_finished:  # nothing was lost but the status behind the last response
            self._closed.set()
            return
        delay = self._resumption.delay_after(error, accepted=is_accepted(self._call.initial_metadata()))
        if delay is None:
            self._closed.set()
            raise error from None
        if not self._closed.wait(delay):
            self._call = self._start(self._resumption.request(), self._resumption.timeout_s)
            if self._closed.is_set():  # `close` may have cancelled the call before
                self._call.cancel()

    def close(self) -> None:
        """Cancels the request if it still runs. Idempotent."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Calls the server at `address`, its gRPC address: HOST:PORT or unix:PATH.

    The connection is made with the first call and again after it breaks. Every method raises an error of
    `octavo.errors`: UnavailableError where nobody answers, DeadlineError where `timeout` (in seconds) has passed. A
    closed client cannot be used again.

    A generation whose server goes away is resumed, with no token lost or doubled, on the server that is at the same
    address within `resume_timeout_s` (in seconds; 0 raises UnavailableError at once). With `wait_for_server` one that
    cannot be sent at first is waited for in the same way.

    A server that asks for keys is given `api_key`, or else the environment variable OCTAVO_API_KEY. `tls` encrypts and
    checks the server's certificate; `AccessOptions` tells of the files.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
        wait_for_server: bool = False,
        **access: Unpack[AccessOptions],
    ) -> None:
        self._resume_timeout_s = resume_timeout_s
        self._wait_for_server = wait_for_server
        self._address = check_address(address)
        self._access = Access.of(access)
        self._channel = self._access.channel(address)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_method(self._channel)
        self._closed = False

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._address

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Generates to the end. Without `sampling_params` the model's defaults hold, up to the context's end."""
        return self._finish(generate_request(prompt, sampling_params, options, final_only=True), options)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationStream:
        """As `generate`, and yields what is new as it comes."""
        return self._start(generate_request(prompt, sampling_params, options, final_only=False), options)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """Generates the next turn of a conversation to its end."""
        return self._finish(chat_request(messages, sampling_params, options, final_only=True), options)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerationStream:
        """As `chat`, and yields what is new as it comes."""
        return self._start(chat_request(messages, sampling_params, options, final_only=False), options)

    def tokenize(
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
        return list(self._call(self._inference.Tokenize, request, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids. Bytes that are no whole character appear as U+FFFD."""
        request = detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return self._call(self._inference.Detokenize, request, timeout).text

    def list_models(self, *, timeout: float | None = None) -> list[inference_pb2.Model]:
        """The served models, as the contract's messages: name, digest, max_model_len, vocab_size, has_chat_template."""
        return list(self._call(self._inference.ListModels, inference_pb2.ListModelsRequest(), timeout).models)

    def health(self, *, timeout: float | None = None) -> bool:
        """Whether the server takes requests. Raises UnavailableError where nobody answers."""
        response = self._call(self._health, health_pb2.HealthCheckRequest(), timeout)
        return says_serving(response)

    def state(self, *, timeout: float | None = None) -> admin_pb2.GetStateResponse:
        """What the router's workers, queues and KV pools hold now, as the contract's message."""
        return self._call(self._admin.GetState, admin_pb2.GetStateRequest(), timeout)

    def drain(self, *, timeout: float | None = None) -> int:
        """Makes the server refuse new requests and finish the running ones. Returns how many have not ended yet."""
        return self._call(self._admin.Drain, admin_pb2.DrainRequest(), timeout).request_count

    def flush_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Makes the server forget every cached prefix, on both tiers. Returns how many blocks became free."""
        return self._call(self._admin.FlushPrefixCache, admin_pb2.FlushPrefixCacheRequest(), timeout).block_count

    def close(self) -> None:
        """Closes the connection; running requests are cancelled. Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, request: inference_pb2.GenerateRequest, options: RequestOptions) -> GenerationStream:
        builder = OutputBuilder(request)
        resumption = Resumption(
            request,
            builder,
            timeout_s=options.get("timeout"),
            resume_timeout_s=self._resume_timeout_s,
            wait_for_server=self._wait_for_server,
        )
        return GenerationStream(self._open, builder, resumption, self._address)

    def _open(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> _GenerateCall:
        self._check_open()
        return self._inference.Generate(request, timeout=timeout, metadata=self._access.metadata)

    def _finish(self, request: inference_pb2.GenerateRequest, options: RequestOptions) -> RequestOutput:
        with self._start(request, options) as stream:
            for _ in stream:
                pass
            return stream.output

    def _call(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout: float | None
    ) -> _Response:
        self._check_open()
        try:
            return method(request, timeout=timeout, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise error_of(cast(FailedCall, error), self._address) from None

    def _check_open(self) -> None:
        if self._closed:
            raise RequestCancelledError(f"the client for {self._address} is closed; make a new one")
