"""Turns GenerateResponses into OpenAI's JSON: whole answers, and the events of a stream.

One answer object belongs to one HTTP request; it remembers what a stream has said so far. Every chunk has the keys that
OpenAI's have, `finish_reason` too. A sample's last text and its finish_reason come in chunks of their own, so that a
client which stops reading at finish_reason loses nothing. Beyond OpenAI there is `stop_reason`, as in vLLM: the stop
string or stop token that ended the sample, null for an end-of-sequence token.

How log-probabilities are written is `openai_logprobs.py`'s.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.v1 import inference_pb2 as pb
from octavo_router.json_text import dumps as _dumps
from octavo_router.openai_logprobs import CompletionLogprobs, finite, prompt_logprobs, token_text
from octavo_router.openai_requests import param_of

_FINISH_REASONS: dict[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


@dataclass(frozen=True)
class AnswerOptions:
    """What an answer is made with.

    id: the answer's name; model: the name the client used; digest: the model's; include_usage: a stream ends with a
    usage chunk; continuous_usage: and every chunk says what was used so far; stop_token_ids: the request's;
    token_bytes: the bytes of a token's text; prompt_texts: each prompt as it would be echoed, for text_offset (with
    log-probabilities of completions only); echo_logprobs: how many likeliest tokens come beside each token of an echoed
    prompt, None where it has no log-probabilities among the choice's; prompt_logprobs: the same for the field of that
    name; grammar_param: the field that asked for structured output.
    """

    id: str
    model: str
    digest: str
    logprobs: bool
    token_bytes: Callable[[int], bytes]
    include_usage: bool = False
    continuous_usage: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    prompt_texts: Sequence[str] = ()
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar_param: str = ""
    created: int = field(default_factory=lambda: int(time.time()))


class Answer(ABC):
    """The answer to one HTTP request, whose prompts' responses are numbered by `prompt_index`."""

    object_name: str
    chunk_object_name: str

    def __init__(self, options: AnswerOptions, num_samples: int) -> None:
        self._options = options
        self._num_samples = num_samples
        self._usages: list[pb.Usage] = []
        self._num_streamed = 0
        self._prompts: dict[int, pb.PromptInfo] = {}
        self._chunk_head = _dumps(self._head(self.chunk_object_name))[:-1] + ',"choices":['
        # With include_usage, OpenAI gives every chunk but the last a null.
        self._chunk_tail = '],"usage":null}\n\n' if options.include_usage else "]}\n\n"

    def whole(self, responses: Sequence[pb.GenerateResponse]) -> bytes:
        """The body of an answer that does not stream, from each prompt's only response."""
        choices = []
        for prompt_index, response in enumerate(responses):
            self._prompts[prompt_index] = response.prompt
            self._usages.append(response.usage)
            choices += [self._choice(prompt_index, delta) for delta in response.deltas]
        answer = self._head(self.object_name) | {"choices": choices, "usage": _usage(self._usages)}
        return _dumps(answer | self._prompt_fields()).encode()

    def events(self, prompt_index: int, response: pb.GenerateResponse) -> bytes:
        """The events that a response of a stream gives. May be none."""
        if response.HasField("usage"):
            self._usages.append(response.usage)
        if response.HasField("prompt"):
            self._prompts[prompt_index] = response.prompt
        tail = self._chunk_tail
        if self._options.continuous_usage:
            self._num_streamed += sum(len(delta.token_ids) for delta in response.deltas)
            tail = f'],"usage":{_dumps(self._usage_so_far())}}}\n\n'
        return "".join(
            f"data: {self._chunk_head}{choice}{tail}"
            for delta in response.deltas
            for choice in self._chunk_choices(prompt_index, delta)
        ).encode()

    def last_events(self) -> bytes:
        """The events that end a stream whose requests have all ended well."""
        if not self._options.include_usage:
            return _DONE
        chunk = self._head(self.chunk_object_name) | {"choices": [], "usage": _usage(self._usages)}
        return f"data: {_dumps(chunk)}\n\n".encode() + _DONE

    def _usage_so_far(self) -> Json:
        """What the prompts whose answers have begun, and all tokens streamed, come to."""
        num_prompt = sum(prompt.token_count for prompt in self._prompts.values())
        return _usage([pb.Usage(prompt_token_count=num_prompt, completion_token_count=self._num_streamed)])

    def failure_events(self, error_body: bytes) -> bytes:
        """The event that ends a stream which failed after it had begun. error_body: the error as JSON."""
        return b"data: " + error_body + b"\n\n"

    def param_of(self, field: str) -> str:
        """The name in the HTTP request of a field of the contract."""
        if field.startswith("sampling.grammar") and self._options.grammar_param:
            return self._options.grammar_param
        return param_of(field)

    @abstractmethod
    def _choice(self, prompt_index: int, delta: pb.SampleDelta) -> Json:
        """The choice of a whole answer."""

    @abstractmethod
    def _chunk_choices(self, prompt_index: int, delta: pb.SampleDelta) -> Iterable[str]:
        """The choices, as JSON and one a chunk, for a delta of a stream."""

    def _prompt_fields(self) -> Json:
        """What a whole answer says of its prompt beside its choices."""
        return {}

    def _prompt_logprobs(self, prompt_index: int) -> Json:
        """The field `prompt_logprobs`, where it is asked for."""
        num_top = self._options.prompt_logprobs
        if num_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._prompts[prompt_index], num_top, self._options.token_bytes)}

    def _head(self, object_name: str) -> Json:
        options = self._options
        return {
            "id": options.id,
            "object": object_name,
            "created": options.created,
            "model": options.model,
            "system_fingerprint": f"fp_{options.digest.rpartition(':')[2][:12]}",
        }

    def _index(self, prompt_index: int, delta: pb.SampleDelta) -> int:
        return prompt_index * self._num_samples + delta.sample_index

    def _finish(self, delta: pb.SampleDelta) -> Json:
        """finish_reason and stop_reason of a sample that has ended."""
        matched: str | int | None = None
        if delta.WhichOneof("matched") == "matched_stop":
            matched = delta.matched_stop
        elif delta.matched_token_id in self._options.stop_token_ids and delta.HasField("matched_token_id"):
            matched = delta.matched_token_id
        return {"finish_reason": _FINISH_REASONS[delta.finish_reason], "stop_reason": matched}


class CompletionAnswer(Answer):
    """/v1/completions. In a stream, the prompt's log-probabilities come in a choice's first chunk."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, options: AnswerOptions, num_samples: int) -> None:
        super().__init__(options, num_samples)
        self._logprobs_of: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def _choice(self, prompt_index: int, delta: pb.SampleDelta) -> Json:
        return {
            "index": self._index(prompt_index, delta),
            "text": delta.text,
            "logprobs": self._logprobs(prompt_index, delta),
            **self._finish(delta),
            **self._prompt_logprobs(prompt_index),
        }

    def _chunk_choices(self, prompt_index: int, delta: pb.SampleDelta) -> Iterable[str]:
        index = self._index(prompt_index, delta)
        options = self._options
        brings_prompt = options.echo_logprobs is not None or options.prompt_logprobs is not None
        if brings_prompt and index not in self._begun:
            self._begun.add(index)
            choice = {"index": index, "text": delta.text, "logprobs": self._logprobs(prompt_index, delta)}
            yield _dumps(choice | {"finish_reason": None} | self._prompt_logprobs(prompt_index))
        elif delta.text or delta.logprobs:
            logprobs = _dumps(self._logprobs(prompt_index, delta)) if delta.logprobs else "null"
            yield f'{{"index":{index},"text":{_dumps(delta.text)},"logprobs":{logprobs},"finish_reason":null}}'
        if delta.finish_reason:
            yield _dumps({"index": index, "text": "", "logprobs": None, **self._finish(delta)})

    def _logprobs(self, prompt_index: int, delta: pb.SampleDelta) -> Json | None:
        """The log-probabilities of the new tokens; of an echoed prompt too, before a choice's first ones."""
        index, options = self._index(prompt_index, delta), self._options
        if not options.logprobs:
            return None
        part = None
        if index not in self._logprobs_of:
            writer = CompletionLogprobs(options.token_bytes, options.prompt_texts[prompt_index])
            self._logprobs_of[index] = writer
            if options.echo_logprobs is not None:
                part = writer.of_prompt(self._prompts[prompt_index], options.echo_logprobs)
        return self._logprobs_of[index].of_tokens(delta.logprobs, part)


class ChatAnswer(Answer):
    """/v1/chat/completions. A stream does not bring the prompt's log-probabilities, as vLLM's does not."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions, num_samples: int) -> None:
        super().__init__(options, num_samples)
        self._begun: set[int] = set()

    def _choice(self, prompt_index: int, delta: pb.SampleDelta) -> Json:
        return {
            "index": self._index(prompt_index, delta),
            "message": {"role": "assistant", "refusal": None, **_message_fields(delta)},
            "logprobs": self._logprobs(delta) if self._options.logprobs else None,
            **self._finish(delta),
        }

    def _prompt_fields(self) -> Json:
        return self._prompt_logprobs(0)

    def _chunk_choices(self, prompt_index: int, delta: pb.SampleDelta) -> Iterable[str]:
        index = self._index(prompt_index, delta)
        if index not in self._begun:
            self._begun.add(index)
            yield (
                f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'
            )
        fields = _delta_fields(delta)
        if fields or delta.logprobs:
            logprobs = _dumps(self._logprobs(delta)) if delta.logprobs else "null"
            yield (
                f'{{"index":{index},"delta":{_dumps(fields or {"content": ""})},'
                f'"logprobs":{logprobs},"finish_reason":null}}'
            )
        if delta.finish_reason:
            yield _dumps({"index": index, "delta": {}, "logprobs": None, **self._finish(delta)})

    def _logprobs(self, delta: pb.SampleDelta) -> Json:
        content = [
            self._entry(entry) | {"top_logprobs": [self._entry(likely) for likely in entry.top]}
            for entry in delta.logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, entry: pb.TokenLogprobs | pb.TopLogprob) -> Json:
        data = self._options.token_bytes(entry.token_id)
        return {"token": token_text(data), "logprob": finite(entry.logprob), "bytes": list(data)}


def _message_fields(delta: pb.SampleDelta) -> Json:
    """What a whole message says: content, which is null where the text is all calls, and the calls."""
    if not delta.HasField("parsed"):
        return {"content": delta.text}
    parsed = delta.parsed
    if not parsed.tool_calls:
        return {"content": parsed.content}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
        for call in parsed.tool_calls
    ]
    return {"content": parsed.content or None, "tool_calls": calls}


def _delta_fields(delta: pb.SampleDelta) -> Json:
    """What a chunk adds to a message; empty for nothing. A call's first chunk has its id and its name."""
    if not delta.HasField("parsed"):
        return {"content": delta.text} if delta.text else {}
    fields: Json = {"content": delta.parsed.content} if delta.parsed.content else {}
    if delta.parsed.tool_calls:
        fields["tool_calls"] = [
            {
                "index": call.index,
                **({"id": call.id, "type": "function"} if call.id else {}),
                "function": {**({"name": call.name} if call.name else {}), "arguments": call.arguments_json},
            }
            for call in delta.parsed.tool_calls
        ]
    return fields


def _usage(usages: Iterable[pb.Usage]) -> Json:
    prompt = completion = cached = 0
    for usage in usages:
        prompt += usage.prompt_token_count
        completion += usage.completion_token_count
        cached += usage.cached_token_count
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
