"""Puts a stream of `GenerateResponse` together: deltas for those who follow it, one `RequestOutput` for those who wait.

Does no I/O; both clients feed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.errors import InternalError
from octavo.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    OutputDelta,
    RequestOutput,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from octavo.v1 import inference_pb2

_FINISH_REASONS: dict[int, FinishReason | None] = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    inference_pb2.FINISH_REASON_ERROR: "error",
}
_FINISH_CODES = {reason: code for code, reason in _FINISH_REASONS.items()}


@dataclass
class _Call:
    """What has come of one tool call so far."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass
class _Sample:
    """What has come of one sample so far. logprob_sum: of the tokens, whose log-probabilities were asked for."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    logprob_sum: float = 0.0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    content: list[str] | None = None
    calls: dict[int, _Call] = field(default_factory=dict)

    def take_parsed(self, parsed: inference_pb2.ParsedDelta) -> list[ToolCallDelta]:
        """Takes what the text says; returns what the calls gained."""
        self.content = self.content or []
        self.content.append(parsed.content)
        for call in parsed.tool_calls:
            known = self.calls.setdefault(call.index, _Call(call.id, call.name))
            known.arguments.append(call.arguments_json)
        return [ToolCallDelta(call.index, call.id, call.name, call.arguments_json) for call in parsed.tool_calls]


class OutputBuilder:
    """Collects the responses to one request. `add` takes them in order; `output` may be asked for at any time.

    A request that was resumed goes on in the same builder: its responses bring only what is new.
    """

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request_id = request.request_id
        self._prompt = request.text if request.WhichOneof("prompt") == "text" else None
        self._prompt_token_ids = list(request.token_ids.ids) if request.WhichOneof("prompt") == "token_ids" else None
        self._stop_token_ids = frozenset(request.stop.stop_token_ids)
        self._has_logprobs = request.output.HasField("logprobs")
        sampling = request.sampling
        # What is chosen by its log-probability comes with it, asked for or not.
        self._has_cumulative_logprob = (
            self._has_logprobs or sampling.HasField("beam_search") or sampling.best_of > max(sampling.n, 1)
        )
        self._has_prompt_logprobs = request.output.HasField("prompt_logprobs")
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._samples: dict[int, _Sample] = {}
        self._usage: Usage | None = None
        self._seed: int | None = None
        self._model = ""
        self._model_digest = ""

    def add(self, response: inference_pb2.GenerateResponse) -> list[OutputDelta]:
        """Takes the next response and returns what it brought, at most one delta a sample."""
        self._request_id = response.request_id or self._request_id
        self._model = response.model or self._model
        if response.HasField("prompt"):
            self._take_prompt(response.prompt)
        deltas = [self._take_delta(delta) for delta in response.deltas]
        if response.HasField("usage"):
            usage = response.usage
            self._usage = Usage(usage.prompt_token_count, usage.completion_token_count, usage.cached_token_count)
        return deltas

    def output(self) -> RequestOutput:
        """The answer as far as it has come; `finished` tells whether that is all of it."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion(index) for index in sorted(self._samples)],
            finished=self._usage is not None,
            prompt_logprobs=self._prompt_logprobs,
            usage=self._usage,
            seed=self._seed,
            model=self._model,
            model_digest=self._model_digest,
        )

    @property
    def request_id(self) -> str:
        """The request's name: the server's, once it has said one."""
        return self._request_id

    @property
    def is_finished(self) -> bool:
        """Whether the last response has come."""
        return self._usage is not None

    def resume(self) -> inference_pb2.Resume | None:
        """What a server needs to go on behind what has come; None before it has told what it made of the prompt."""
        if self._seed is None or self._prompt_token_ids is None:
            return None
        resume = inference_pb2.Resume(
            prompt_token_ids=self._prompt_token_ids, seed=self._seed, model_digest=self._model_digest
        )
        for index, sample in sorted(self._samples.items()):
            resume.samples.add(
                sample_index=index,
                token_ids=sample.token_ids,
                text_byte_count=sum(len(text.encode()) for text in sample.text),
                finish_reason=_FINISH_CODES[sample.finish_reason],
                cumulative_logprob=sample.logprob_sum,
            )
        return resume

    def check_finished(self) -> None:
        """Raises InternalError if the stream has ended without its last response."""
        if self._usage is None:
            raise InternalError(f"the server ended the stream of request {self._request_id!r} without a last response")

    def _take_prompt(self, prompt: inference_pb2.PromptInfo) -> None:
        self._seed = prompt.seed
        self._model_digest = prompt.model_digest
        if prompt.token_ids:
            self._prompt_token_ids = list(prompt.token_ids)
        if self._has_prompt_logprobs and self._prompt_logprobs is None:
            self._prompt_logprobs = [entry or None for entry in _logprob_dicts(prompt.logprobs, first_is_empty=True)]

    def _take_delta(self, delta: inference_pb2.SampleDelta) -> OutputDelta:
        sample = self._samples.setdefault(delta.sample_index, _Sample())
        logprobs = _logprob_dicts(delta.logprobs)
        sample.text.append(delta.text)
        sample.token_ids.extend(delta.token_ids)
        sample.logprobs.extend(logprobs)
        for entry in delta.logprobs:
            sample.logprob_sum += entry.logprob  # one by one, as the server adds them up
        sample.finish_reason = _FINISH_REASONS.get(delta.finish_reason)
        if sample.finish_reason is not None:
            sample.cumulative_logprob = delta.cumulative_logprob
            sample.stop_reason = self._stop_reason(delta)
        is_parsed = delta.HasField("parsed")
        calls = sample.take_parsed(delta.parsed) if is_parsed else []
        return OutputDelta(
            index=delta.sample_index,
            text=delta.text,
            token_ids=list(delta.token_ids),
            logprobs=logprobs if self._has_logprobs else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            content=delta.parsed.content if is_parsed else None,
            tool_calls=calls,
        )

    def _stop_reason(self, delta: inference_pb2.SampleDelta) -> int | str | None:
        match delta.WhichOneof("matched"):
            case "matched_stop":
                return delta.matched_stop
            case "matched_token_id" if delta.matched_token_id in self._stop_token_ids:
                return delta.matched_token_id
        return None  # an end-of-sequence token, as in vLLM

    def _completion(self, index: int) -> CompletionOutput:
        sample = self._samples[index]
        return CompletionOutput(
            index=index,
            text="".join(sample.text),
            token_ids=list(sample.token_ids),
            cumulative_logprob=sample.cumulative_logprob if self._has_cumulative_logprob else None,
            logprobs=list(sample.logprobs) if self._has_logprobs else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            content=None if sample.content is None else "".join(sample.content),
            tool_calls=[
                ToolCall(call.id, call.name, "".join(call.arguments)) for _, call in sorted(sample.calls.items())
            ],
        )


def _logprob_dicts(
    entries: Iterable[inference_pb2.TokenLogprobs], *, first_is_empty: bool = False
) -> list[dict[int, Logprob]]:
    """One dictionary a token, the token itself first. The entry of a prompt's first token is empty."""
    return [
        {} if first_is_empty and position == 0 else _logprob_dict(entry.token_id, entry.logprob, entry.top)
        for position, entry in enumerate(entries)
    ]


def _logprob_dict(token_id: int, logprob: float, top: Sequence[inference_pb2.TopLogprob]) -> dict[int, Logprob]:
    ranks = {entry.token_id: rank for rank, entry in enumerate(top, start=1)}
    found = {token_id: Logprob(logprob, ranks.get(token_id))}
    for entry in top:
        found.setdefault(entry.token_id, Logprob(entry.logprob, ranks[entry.token_id]))
    return found
