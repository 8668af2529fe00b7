"""The public contract over the engine: octavo.v1 messages in, octavo.v1 messages out.

gRPC and HTTP both call `Inference`, so a request means the same and fails the same on either. It checks requests
(`validation.py`, `token_rules.py`, `resume.py`), reads prompts (`prompts.py`) and compiles grammars (`grammar.py`) off
the event loop, and hands the engine what it takes (`request.py`). Of a request with tools it says what the text calls
(`tool_calls.py`).
How messages and errors travel is the front ends' matter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from octavo.errors import DeadlineError, ModelNotFoundError
from octavo.v1 import inference_pb2 as pb
from octavo_router import grammar, resume, token_rules, validation
from octavo_router.request import (
    FinishReason,
    Output,
    Request,
    RequestUpdate,
    ResumedSample,
    SampleDelta,
    Sampling,
    Stopping,
    TokenLogprobs,
    TokenRules,
    Usage,
)
from octavo_router.tool_calls import NO_TOOLS, CallReader, ToolFormat, ToolUse, naming_tools

if TYPE_CHECKING:
    from octavo_router.engine import Engine
    from octavo_router.grammar import GrammarCompiler
    from octavo_router.metrics import Metrics
    from octavo_router.prompts import Prompt, PromptReader
    from octavo_router.served_model import ServedModel
    from octavo_router.stream import RequestStream

T = TypeVar("T")

# Entries of a prompt's log-probabilities that are written before others get their turn: with 20 likeliest tokens each,
# a few milliseconds.
_ENTRIES_AT_ONCE = 512

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class Inference:
    """InferenceService without a transport. Methods raise `octavo.errors`; a cancelled call releases what it holds."""

    def __init__(
        self,
        engine: Engine,
        prompts: PromptReader,
        metrics: Metrics,
        *,
        grammars: GrammarCompiler,
        tools: ToolFormat = NO_TOOLS,
    ) -> None:
        """tools: how the served model is told about tools, and writes calls."""
        self._engine = engine
        self._prompts = prompts
        self._grammars = grammars
        self._metrics = metrics
        self._tools = tools
        self._num_reading = 0

    @property
    def model_name(self) -> str:
        """The name under which answers report the model."""
        return self._engine.model.names[0]

    @property
    def model_digest(self) -> str:
        """Digest of the served model's weights and configuration."""
        return self._engine.model.digest

    async def generate(
        self,
        request: pb.GenerateRequest,
        *,
        deadline: float | None = None,
        on_accepted: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Generates. Nothing is yielded before the request is accepted; then comes a response with PromptInfo at once,
        or when the prompt's log-probabilities are there if they are asked for, and further ones as tokens come. With
        final_only there is one response, at the end.

        deadline: in seconds of time.monotonic. on_accepted: awaited once the request is accepted. Close the generator
        (contextlib.aclosing) to release a request early.
        Raises any of `octavo.errors` that `ERROR_TABLE` maps to a client's fault, an overload or an unavailability.
        """
        with self._metrics.counting_refusals():
            request, tool_use = await self._with_tools(request)
            with naming_tools(tool_use):
                engine_request, echoes = await self._accepted(request, deadline, tool_use)
            stream = self._engine.submit(engine_request)
        request_id = engine_request.request_id
        calls = None if tool_use is None else CallReader(tool_use, stream.held_text if engine_request.resumed else None)
        try:
            if on_accepted is not None:
                await on_accepted()
            first = self._first_response(request, engine_request, echoes)
            if engine_request.output.prompt_logprobs is not None:
                await _add_prompt_logprobs(first.prompt, stream)
            if request.output.final_only:
                yield await self._only_response(first, stream, calls)
                return
            yield first
            async for update in stream:
                response = self._response(request_id, update)
                await _read_calls(calls, response.deltas)
                yield response
        finally:
            stream.cancel()

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Token ids of text or messages. Raises InvalidRequestError and ModelNotFoundError, and ContextLengthError for
        text of many times the model's context.
        """
        self._check_model(request.model)
        token_ids = await self._prompts.tokenize(request, self._engine.model)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._engine.model.max_model_len)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Text of token ids. Raises InvalidRequestError and ModelNotFoundError."""
        self._check_model(request.model)
        text = await self._prompts.decode(
            request.token_ids, self._engine.model, skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    def list_models(self) -> pb.ListModelsResponse:
        """Every name that `model` may be, the reported one first."""
        model = self._engine.model
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=name,
                    digest=model.digest,
                    max_model_len=model.max_model_len,
                    vocab_size=model.vocab_size,
                    has_chat_template=self._prompts.has_chat_template,
                    created_unix_s=int(model.created_unix_s),
                )
                for name in model.names
            ]
        )

    def _check_model(self, name: str) -> None:
        names = self._engine.model.names
        if name and name not in names:
            raise ModelNotFoundError(f"model {name[:200]!r} is not served here; served: {', '.join(names)}")

    async def _with_tools(self, request: pb.GenerateRequest) -> tuple[pb.GenerateRequest, ToolUse | None]:
        """The request with the grammar of a call that it requires, and what becomes of its tools: None where no call
        can come.
        """
        if not request.chat.tools and not request.chat.HasField("tool_choice"):
            return request, None
        # Schemas may be long, and are read here.
        tool_use = await asyncio.to_thread(self._tools.use_of, request)
        return (request, None) if tool_use is None else (tool_use.constrained(request), tool_use)

    async def _accepted(
        self, request: pb.GenerateRequest, deadline: float | None, tool_use: ToolUse | None
    ) -> tuple[Request, Sequence[str]]:
        """The request as the engine takes it, and the text that each sample begins with; none for no echo."""
        model = self._engine.model
        validation.refuse_unsupported(request, model.capabilities)
        validation.check_request_id(request.request_id)
        validation.check_tenant(request.tenant)
        self._check_model(request.model)
        # What costs nothing to check comes before the prompt is tokenized.
        sampling = validation.sampling_of(request.sampling, model.default_sampling)
        if is_resumed := request.HasField("resume"):
            resume.check_model(request.resume, model.digest)
            sampling = resume.resumed_sampling(
                request.resume, sampling, is_seed_given=request.sampling.HasField("seed")
            )
        rules = token_rules.rules_of(request.sampling, vocab_size=model.vocab_size)
        token_rules.check_bad_words(request.sampling.bad_words)
        source = grammar.source_of(request.sampling.grammar) if request.sampling.HasField("grammar") else None
        output = validation.output_of(request.output)
        if tool_use is not None and tool_use.shown_token_ids:
            output = dataclasses.replace(output, shown_special_ids=tool_use.shown_token_ids)
        if is_resumed:
            # The caller has them: they came with the seed and the digest that it names.
            output = dataclasses.replace(output, prompt_logprobs=None)
        self._engine.check_room(self._num_reading)
        prompt = await self._read_prompt(request, model, deadline)
        stopping = validation.stopping_of(
            request.stop,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            is_prompt_only=validation.is_prompt_only(request),
        )
        token_rules.check_some_token_remains(rules, stopping, self._prompts.eos_token_ids)
        rules = await _before(deadline, self._resolved(rules, request.sampling.bad_words, source))
        sampling = dataclasses.replace(sampling, rules=rules)
        echo = await self._echo(request, prompt, output) if request.output.echo else ""
        echoes: Sequence[str] = [echo] * sampling.n if echo else ()
        resumed: tuple[ResumedSample, ...] = ()
        if is_resumed:
            resumed = self._resumed(request.resume, prompt, sampling, stopping, num_echo_bytes=len(echo.encode()))
            if echo:
                echoes = resume.unsent_echo(request.resume, sampling, echo)
        accepted = Request(
            request_id=request.request_id or new_request_id(),
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            stopping=stopping,
            output=output,
            priority=request.priority,
            deadline=deadline,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            resumed=resumed,
        )
        return accepted, echoes

    async def _read_prompt(self, request: pb.GenerateRequest, model: ServedModel, deadline: float | None) -> Prompt:
        self._num_reading += 1
        try:
            return await _before(deadline, self._prompts.read(request, model))
        finally:
            self._num_reading -= 1

    async def _resolved(self, rules: TokenRules, bad_words: Sequence[str], source: grammar.Source | None) -> TokenRules:
        """rules with the tokens of bad words and the compiled grammar."""
        if bad_words:
            rules = dataclasses.replace(rules, bad_words=await self._prompts.bad_word_token_ids(bad_words))
        if source is not None:
            rules = dataclasses.replace(rules, grammar=await self._grammars.compile(source))
        return rules

    def _resumed(
        self, held: pb.Resume, prompt: Prompt, sampling: Sampling, stopping: Stopping, *, num_echo_bytes: int
    ) -> tuple[ResumedSample, ...]:
        """What the caller holds of each sample, checked."""
        resume.check_prompt(held, prompt.token_ids)
        return resume.resumed_samples(
            held,
            sampling,
            num_echo_bytes=num_echo_bytes,
            max_tokens=stopping.max_tokens,
            vocab_size=self._engine.model.vocab_size,
        )

    async def _echo(self, request: pb.GenerateRequest, prompt: Prompt, output: Output) -> str:
        """The prompt's text as the answer repeats it: as it was given, or decoded from the ids that were given."""
        if prompt.text is not None:
            return prompt.text
        return await self._prompts.decode(
            request.token_ids.ids, self._engine.model, skip_special_tokens=output.skip_special_tokens
        )

    def _first_response(
        self, request: pb.GenerateRequest, accepted: Request, echoes: Sequence[str]
    ) -> pb.GenerateResponse:
        prompt_info = pb.PromptInfo(
            seed=accepted.sampling.seed,
            model_digest=self._engine.model.digest,
            token_count=len(accepted.prompt_token_ids),
            token_ids=accepted.prompt_token_ids if request.output.return_prompt_token_ids else (),
        )
        deltas = [pb.SampleDelta(sample_index=index, text=echo) for index, echo in enumerate(echoes) if echo]
        return pb.GenerateResponse(
            request_id=accepted.request_id, model=self.model_name, prompt=prompt_info, deltas=deltas
        )

    def _response(self, request_id: str, update: RequestUpdate) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            request_id=request_id,
            model=self.model_name,
            deltas=[_delta_message(delta) for delta in update.deltas],
            usage=None if update.usage is None else _usage_message(update.usage),
        )

    async def _only_response(
        self, first: pb.GenerateResponse, stream: RequestStream, calls: CallReader | None
    ) -> pb.GenerateResponse:
        """first with the only update joined to it, one delta a sample."""
        echoes = {delta.sample_index: delta.text for delta in first.deltas}
        update = await anext(stream)
        del first.deltas[:]
        first.deltas.extend(_delta_message(delta) for delta in sorted(update.deltas, key=attrgetter("sample_index")))
        if update.usage is not None:
            first.usage.CopyFrom(_usage_message(update.usage))
        for delta in first.deltas:
            delta.text = echoes.get(delta.sample_index, "") + delta.text
        await _read_calls(calls, first.deltas, {index: len(text) for index, text in echoes.items()})
        return first


def new_request_id() -> str:
    """A request's name where the caller gave none."""
    return uuid.uuid4().hex


def _delta_message(delta: SampleDelta) -> pb.SampleDelta:
    message = pb.SampleDelta(
        sample_index=delta.sample_index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[_logprobs_message(entry) for entry in delta.logprobs],
    )
    if delta.finish_reason is not None:
        message.finish_reason = _FINISH_REASONS[delta.finish_reason]
        message.cumulative_logprob = delta.cumulative_logprob
        if isinstance(delta.matched, str):
            message.matched_stop = delta.matched
        elif delta.matched is not None:
            message.matched_token_id = delta.matched
    return message


def _logprobs_message(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
    )


def _usage_message(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_token_count=usage.prompt_tokens,
        completion_token_count=usage.completion_tokens,
        cached_token_count=usage.cached_tokens,
    )


async def _add_prompt_logprobs(prompt: pb.PromptInfo, stream: RequestStream) -> None:
    """Waits for the prompt's log-probabilities and adds an entry a token, an empty one for the first."""
    entries = await stream.prompt_logprobs()
    prompt.logprobs.add()
    for index, entry in enumerate(entries, 1):
        prompt.logprobs.append(_logprobs_message(entry))
        if index % _ENTRIES_AT_ONCE == 0:
            await asyncio.sleep(0)


async def _read_calls(
    calls: CallReader | None, deltas: Iterable[pb.SampleDelta], starts: Mapping[int, int] | None = None
) -> None:
    """Adds to deltas what their text says, from where it starts on by sample; much text in a thread."""
    if calls is None:
        return
    for delta in deltas:
        start = starts.get(delta.sample_index, 0) if starts else 0
        if calls.has_much_to_read(delta):
            await asyncio.to_thread(calls.read, delta, start=start)
        else:
            calls.read(delta, start=start)


async def _before(deadline: float | None, work: Awaitable[T]) -> T:
    """The result of work, or DeadlineError where it is not there in time."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await work
    except TimeoutError:
        raise DeadlineError("the deadline passed before the request was read") from None
