"""An engine, a tokenizer and a template simple enough to predict, for tests of the front ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import InvalidRequestError, OctavoError, OverloadedError, UnavailableError
from octavo.v1 import admin_pb2
from octavo.worker.v1 import worker_pb2
from octavo_router.backend import Backend
from octavo_router.chat_template import ChatTemplate
from octavo_router.grammar import Source
from octavo_router.inference import Inference
from octavo_router.metrics import Metrics
from octavo_router.prompts import PromptReader
from octavo_router.request import (
    FinishReason,
    Request,
    RequestUpdate,
    SampleDelta,
    Sampling,
    TokenLogprobs,
    Usage,
)
from octavo_router.tool_calls import NO_TOOLS, ToolFormat

EOS = 256
VOCAB_SIZE = 300


class ByteTokenizer:
    """Token ids are the bytes of UTF-8; EOS is a special token."""

    eos_token_ids = frozenset({EOS})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = False
    ) -> str:
        return b"".join(b"" if skip_special_tokens and i == EOS else self.token_bytes(i) for i in ids).decode(
            errors="replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id]) if token_id < 256 else b""

    def token_spelling(self, token_id: int) -> str:
        return f"<{token_id:02x}>"

    def min_token_count(self, text: str) -> int:
        return len(text)


class LineTemplate:
    """`role: content` lines. Refuses a second system message, as real templates refuse things."""

    source = "lines, tools and tool_calls"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        self.calls.append({"messages": messages, "variables": variables, "tools": tools})
        if [message["role"] for message in messages].count("system") > 1:
            raise InvalidRequestError("only one system message is possible", field="chat.messages")
        text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        if continue_final_message:
            return text
        return text + ("\nassistant:" if add_generation_prompt else "\n")


@dataclass
class FakeModel:
    names: tuple[str, ...] = ("tiny", "tiny-alias")
    digest: str = "sha256:0123456789abcdef"
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 512
    created_unix_s: int = 1_700_000_000
    default_sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.5, top_k=40))
    capabilities: frozenset[int] = frozenset(worker_pb2.Capability.values())


class FakeStream:
    """Says the engine's text, a byte a token and a character a delta, once for each sample."""

    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self.request = request
        self.cancelled = False
        self._engine = engine
        self._updates = self._joined() if request.output.final_only else self._make_updates()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestUpdate:
        return await anext(self._updates)

    async def prompt_logprobs(self) -> Iterator[TokenLogprobs]:
        """Each token is a quarter as likely as the one before, and the one above it is the likeliest."""
        ids, top = self.request.prompt_token_ids, self.request.output.prompt_logprobs or 0
        entries = [
            TokenLogprobs(token_id, -0.25 * place, tuple((token_id + 1 - rank, -0.125 - rank) for rank in range(top)))
            for place, token_id in enumerate(ids[1:], 1)
        ]
        return iter(entries)

    def held_text(self, index: int) -> str:
        return self._engine.held_text

    def cancel(self) -> None:
        if self not in self._engine.running:
            return
        self.cancelled = True
        self._engine.running.remove(self)
        self._engine.cancelled.append(self.request.request_id)
        self._engine.on_cancel.set()

    async def _joined(self) -> AsyncIterator[RequestUpdate]:
        deltas: dict[int, SampleDelta] = {}
        usage: Usage | None = None
        async for update in self._make_updates():
            usage = update.usage
            for new in update.deltas:
                delta = deltas.setdefault(new.sample_index, SampleDelta(new.sample_index))
                delta.token_ids += new.token_ids
                delta.text += new.text
                delta.logprobs += new.logprobs
                delta.finish_reason, delta.matched = new.finish_reason, new.matched
                delta.cumulative_logprob = new.cumulative_logprob
        yield RequestUpdate(list(deltas.values()), usage)

    async def _make_updates(self) -> AsyncIterator[RequestUpdate]:
        engine, request = self._engine, self.request
        num_tokens = 0
        if not request.stopping.max_tokens:
            reason = FinishReason.LENGTH
            yield RequestUpdate([SampleDelta(index, finish_reason=reason) for index in range(request.sampling.n)])
        for position, character in enumerate(engine.text[: request.stopping.max_tokens]):
            if position >= engine.hold_after:
                await engine.released.wait()
            if engine.failure is not None and position == engine.fail_at:
                engine.running.remove(self)
                raise engine.failure
            await asyncio.sleep(0)
            ids = list(character.encode())
            num_tokens += len(ids)
            ends = position == len(engine.text) - 1 or position + 1 >= request.stopping.max_tokens
            yield RequestUpdate([self._delta(index, ids, character, ends) for index in range(request.sampling.n)])
            if ends:
                break
        engine.running.remove(self)
        usage = Usage(len(request.prompt_token_ids), num_tokens * request.sampling.n, engine.cached_tokens)
        yield RequestUpdate([], usage)

    def _delta(self, index: int, ids: list[int], text: str, ends: bool) -> SampleDelta:
        top = self.request.output.logprobs
        logprobs = []
        if top is not None:
            logprobs = [TokenLogprobs(i, -0.25, tuple((i + rank, -0.25 - rank) for rank in range(top))) for i in ids]
        delta = SampleDelta(index, ids, text, logprobs)
        if ends:
            delta.finish_reason = self._engine.finish_reason
            delta.matched = self._engine.matched
            delta.cumulative_logprob = -1.5
        return delta


class FakeEngine:
    """Accepts every request unless `refusal` is set."""

    def __init__(self, text: str = "Paris.") -> None:
        self.text = text
        self.model = FakeModel()
        self.metrics = Metrics()
        self.finish_reason = FinishReason.STOP
        self.matched: str | int | None = EOS
        self.cached_tokens = 0
        self.held_text = ""
        self.refusal: OctavoError | None = None
        self.failure: Exception | None = None
        self.fail_at = 0
        self.hold_after = 1 << 30
        self.released = asyncio.Event()
        self.on_cancel = asyncio.Event()
        self.on_submit = asyncio.Event()
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.running: list[FakeStream] = []
        self.is_draining = False
        self.is_connected = True
        self.max_reading = 1 << 30

    @property
    def is_ready(self) -> bool:
        return self.is_connected and not self.is_draining

    def check_room(self, num_reading: int) -> None:
        if self.is_draining:
            raise UnavailableError("the server is stopping")
        if num_reading >= self.max_reading:
            raise OverloadedError(f"{num_reading} prompts are being read", retry_after_s=2)

    def submit(self, request: Request) -> FakeStream:
        self.check_room(0)
        if self.refusal is not None:
            raise self.refusal
        stream = FakeStream(self, request)
        self.requests.append(request)
        self.running.append(stream)
        self.metrics.accepted(len(request.prompt_token_ids))
        self.on_submit.set()
        return stream

    def begin_drain(self) -> int:
        self.is_draining = True
        return len(self.running)

    def flush_prefix_cache(self) -> int:
        return 5

    def state(self) -> admin_pb2.GetStateResponse:
        return admin_pb2.GetStateResponse(
            draining=self.is_draining, queue=admin_pb2.QueueState(request_count=len(self.running))
        )


class FakeGrammars:
    """Compiles a grammar to its kind and text. Refuses a text with "bad" in it."""

    async def compile(self, source: Source) -> str:
        if "bad" in source.text:
            raise InvalidRequestError(f"{source.kind} cannot be enforced", field=f"sampling.grammar.{source.kind}")
        return f"{source.kind}:{source.text}"


def make_inference(
    engine: FakeEngine, template: LineTemplate | ChatTemplate | None = None, tools: ToolFormat = NO_TOOLS
) -> Inference:
    """Inference over the fakes."""
    reader = PromptReader(ByteTokenizer(), template or LineTemplate(), num_threads=1)  # type: ignore[arg-type]
    return Inference(engine, reader, engine.metrics, grammars=FakeGrammars(), tools=tools)  # type: ignore[arg-type]


def make_backend(
    engine: FakeEngine, template: LineTemplate | ChatTemplate | None = None, tools: ToolFormat = NO_TOOLS
) -> Backend:
    """An open backend over the fakes."""
    backend = Backend()
    backend.open(engine, make_inference(engine, template, tools), ByteTokenizer())  # type: ignore[arg-type]
    return backend
