"""`AsyncLLMEngine`: a model inside an asyncio program, such as a FastAPI app.

Starts the same router and worker that `octavo serve` starts and speaks the same contract to them, as `LLM` does for
scripts. It turns streams of deltas into the outputs that vLLM's users iterate over, and knows running requests by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from octavo.async_client import AsyncClient, AsyncGenerationStream
from octavo.engine_args import EngineArgs
from octavo.errors import InvalidRequestError, OctavoError, RequestCancelledError, UnavailableError
from octavo.llm_engine import ModelConfig, model_config_of
from octavo.own_pair import RequestSeeds, started_pair
from octavo.stats import EngineStats
from octavo.types import (
    CompletionOutput,
    Message,
    OutputDelta,
    Prompt,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    ToolCall,
)
from octavo.v1 import admin_pb2

_Outputs = AsyncGenerator[RequestOutput, None]


class AsyncLLMEngine:
    """A model, ready to generate in an event loop.

        engine = AsyncLLMEngine.from_engine_args(EngineArgs(model="SmolLM2-135M-Instruct"))
        async for output in engine.generate("Hello", SamplingParams(max_tokens=32), request_id="1"):
            print(output.outputs[0].text)
        engine.shutdown()

    Making one blocks until the model is loaded; inside an event loop that does other work already, make it with
    `await asyncio.to_thread(AsyncLLMEngine.from_engine_args, args)`. It may be made before the loop runs, and be used
    from one loop after another. A router or worker that dies is started again, and requests that were under way go on.
    Shut it down, or use it as an asynchronous context manager, to give its memory back at once.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        """Starts the engine. Raises StartError if the model cannot be loaded."""
        self._running: dict[str, tuple[asyncio.AbstractEventLoop, AsyncGenerationStream]] = {}
        self._aborted: set[str] = set()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = weakref.WeakKeyDictionary()
        self._seeds = RequestSeeds(engine_args.seed)
        self._is_shut_down = threading.Event()
        end_streams = weakref.WeakMethod(self._end_streams)
        self._pair = started_pair(engine_args, on_end=lambda error: _call(end_streams()))
        self._address = self._pair.wait_ready().grpc
        self._last_state = admin_pb2.GetStateResponse()
        self._finalizer = weakref.finalize(self, self._pair.stop)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Starts an engine. Blocks until the model is loaded. Raises StartError if it cannot be."""
        return cls(engine_args)

    # Requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> _Outputs:
        """Generates behind a prompt and yields the answer so far, each time that it has grown.

        prompt: text, token ids ({"prompt_token_ids": [...]} or a list of integers). sampling_params: None leaves the
        choice of tokens to the model's defaults and the length at 16 tokens; its `output_kind` says whether an output
        holds everything so far, only what is new, or comes once at the end. request_id: unique among the requests that
        run; None draws one. The last output has `finished` set; that of a request that was aborted has the finish
        reason "abort". options: those of `octavo.types.RequestOptions`.

        Leaving the iteration early, by `break`, `aclose()` or the cancelling of its task, ends the request.
        """
        return self._outputs(
            lambda client, params, name: client.stream(prompt, params, request_id=name, **options),
            sampling_params,
            request_id,
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> _Outputs:
        """Generates the next turn of a conversation. options: those of `octavo.types.ChatOptions`. Otherwise as
        `generate`.
        """
        return self._outputs(
            lambda client, params, name: client.stream_chat(messages, params, request_id=name, **options),
            sampling_params,
            request_id,
        )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several: the next output is their last. Names of no running request are no error."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._running:
                self._aborted.add(name)
                self._running[name][1].close()

    # State

    async def get_model_config(self) -> ModelConfig:
        """The model's facts."""
        client = self._client()
        return model_config_of(await client.list_models(), await client.state())

    async def get_state(self) -> admin_pb2.GetStateResponse:
        """What the worker, the queue and the KV pools hold now, as the contract's message."""
        return await self._client().state()

    async def check_health(self) -> None:
        """Raises UnavailableError where requests are not served now, or what ended the engine."""
        if not await self._client().health():
            raise UnavailableError("the engine does not serve now; its worker or router is being started again")

    async def do_log_stats(self) -> None:
        """Prints the engine's statistics in one line; rates are those since the last call."""
        state = await self._client().state()
        print(EngineStats.between(self._last_state, state), flush=True)
        self._last_state = state

    @property
    def address(self) -> str:
        """The gRPC address of this engine, for a `Client` in another thread or process of this machine."""
        return self._address

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return not self._is_shut_down.is_set() and self._pair.error is None

    @property
    def errored(self) -> bool:
        """Whether the engine has ended by itself and will not come back."""
        return self._pair.error is not None

    @property
    def dead_error(self) -> OctavoError:
        """What ended the engine."""
        return self._pair.error or RequestCancelledError("this engine has not ended by itself")

    # Life

    def shutdown(self) -> None:
        """Ends every request, stops router and worker and gives the memory back. Blocks for that. Idempotent."""
        self._is_shut_down.set()
        self._end_streams()
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _outputs(
        self,
        start: Callable[[AsyncClient, SamplingParams, str], AsyncGenerationStream],
        sampling_params: SamplingParams | None,
        request_id: str | None,
    ) -> _Outputs:
        params = SamplingParams.model_defaults() if sampling_params is None else sampling_params
        name = uuid.uuid4().hex if request_id is None else request_id
        if name in self._running:
            raise InvalidRequestError(f"a request with the request_id {name!r} is running", field="request_id")
        async with start(self._client(), self._seeds.seeded(params), name) as stream:
            self._running[name] = asyncio.get_running_loop(), stream
            try:
                async for output in _read(stream, params.output_kind):
                    yield output
                if not stream.output.finished:
                    yield self._cut_short(name, stream.output)
            except UnavailableError as error:
                raise self._pair.error or error from None
            finally:
                del self._running[name]
                self._aborted.discard(name)

    def _cut_short(self, name: str, output: RequestOutput) -> RequestOutput:
        """The last output of a request whose stream was closed before its end. Raises what ended the engine, if it
        was that.
        """
        if name not in self._aborted:
            raise self._pair.error or RequestCancelledError("the engine was shut down before the request ended")
        samples = [
            sample if sample.finished() else dataclasses.replace(sample, finish_reason="abort")
            for sample in output.outputs or [CompletionOutput(index=0, text="", token_ids=[])]
        ]
        return dataclasses.replace(output, outputs=samples, finished=True)

    def _client(self) -> AsyncClient:
        """The running loop's client: a connection belongs to one loop."""
        if self._pair.error is not None:
            raise self._pair.error
        if self._is_shut_down.is_set():
            raise RequestCancelledError("this engine is shut down; make a new one")
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = AsyncClient(self._address, wait_for_server=True, api_key="")
        return self._clients[loop]

    def _end_streams(self) -> None:
        """Closes every stream, from whichever thread: nobody will answer any more."""
        for loop, stream in list(self._running.values()):
            if loop is asyncio._get_running_loop():  # who is going to block it must not wait for it
                stream.close()
                continue
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(stream.close)


async def _read(stream: AsyncGenerationStream, kind: RequestOutputKind) -> _Outputs:
    """The stream's outputs, as they were asked for: one for each response of the server's, or one at the end."""
    new: list[OutputDelta] = []
    async for delta in stream:
        new.append(delta)
        if stream.has_more_ready or kind is RequestOutputKind.FINAL_ONLY:
            continue
        yield stream.output if kind is RequestOutputKind.CUMULATIVE else _with_only(new, stream.output)
        new = []
    if kind is RequestOutputKind.FINAL_ONLY and stream.output.finished:
        yield stream.output


def _with_only(deltas: Sequence[OutputDelta], output: RequestOutput) -> RequestOutput:
    """The output with samples that hold just what is new."""
    samples = [
        CompletionOutput(
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            content=delta.content,
            # One without an id goes on with the call before.
            tool_calls=[ToolCall(call.id, call.name, call.arguments) for call in delta.tool_calls],
        )
        for delta in deltas
    ]
    return dataclasses.replace(output, outputs=samples)


def _call(function: Callable[[], None] | None) -> None:
    if function is not None:
        function()
