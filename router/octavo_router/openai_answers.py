"""Turns GenerateResponses into OpenAI's JSON: whole answers, and the events of a stream.

One answer object belongs to one HTTP request; it remembers what a stream has said so far. Every chunk has the keys that
OpenAI's have, `finish_reason` too. A sample's last text and its finish_reason come in chunks of their own, so that a
client which stops reading at finish_reason loses nothing. Beyond OpenAI there is `stop_reason`, as in vLLM: the stop
string or stop token that ended the sample, null for an end-of-sequence token.

Token strings of log-probabilities are the token's own text; a token that is not whole characters is written as OpenAI
writes it, `bytes:\\xe2\\x9c`.
"""

from __future__ import annotations

import codecs
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.v1 import inference_pb2 as pb

# What OpenAI says for a probability too small to matter; JSON has no infinity.
MIN_LOGPROB = -9999.0

_FINISH_REASONS: dict[int, str] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


@dataclass(frozen=True)
class AnswerOptions:
    """What an answer is made with.

    id: the answer's name; model: the name the client used; digest: the model's; include_usage: a stream ends with a
    usage chunk; stop_token_ids: the request's; token_bytes: the bytes of a token's text; prompt_lengths: length of each
    prompt in characters, for text_offset (with log-probabilities of completions only).
    """

    id: str
    model: str
    digest: str
    logprobs: bool
    token_bytes: Callable[[int], bytes]
    include_usage: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    prompt_lengths: Sequence[int] = ()
    created: int = field(default_factory=lambda: int(time.time()))


class Answer(ABC):
    """The answer to one HTTP request, whose prompts' responses are numbered by `prompt_index`."""

    object_name: str
    chunk_object_name: str

    def __init__(self, options: AnswerOptions, num_samples: int) -> None:
        self._options = options
        self._num_samples = num_samples
        self._usages: list[pb.Usage] = []
        self._chunk_head = _dumps(self._head(self.chunk_object_name))[:-1] + ',"choices":['
        # With include_usage, OpenAI gives every chunk but the last a null.
        self._chunk_tail = '],"usage":null}\n\n' if options.include_usage else "]}\n\n"

    def whole(self, responses: Sequence[pb.GenerateResponse]) -> bytes:
        """The body of an answer that does not stream, from each prompt's only response."""
        choices = []
        for prompt_index, response in enumerate(responses):
            self._usages.append(response.usage)
            choices += [self._choice(prompt_index, delta) for delta in response.deltas]
        return _dumps(self._head(self.object_name) | {"choices": choices, "usage": _usage(self._usages)}).encode()

    def events(self, prompt_index: int, response: pb.GenerateResponse) -> bytes:
        """The events that a response of a stream gives. May be none."""
        if response.HasField("usage"):
            self._usages.append(response.usage)
        return "".join(
            f"data: {self._chunk_head}{choice}{self._chunk_tail}"
            for delta in response.deltas
            for choice in self._chunk_choices(prompt_index, delta)
        ).encode()

    def last_events(self) -> bytes:
        """The events that end a stream whose requests have all ended well."""
        if not self._options.include_usage:
            return _DONE
        chunk = self._head(self.chunk_object_name) | {"choices": [], "usage": _usage(self._usages)}
        return f"data: {_dumps(chunk)}\n\n".encode() + _DONE

    @abstractmethod
    def _choice(self, prompt_index: int, delta: pb.SampleDelta) -> Json:
        """The choice of a whole answer."""

    @abstractmethod
    def _chunk_choices(self, prompt_index: int, delta: pb.SampleDelta) -> Iterable[str]:
        """The choices, as JSON and one a chunk, for a delta of a stream."""

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

    def _token(self, token_id: int) -> str:
        return _token_text(self._options.token_bytes(token_id))


class CompletionAnswer(Answer):
    """/v1/completions.

    text_offset counts characters from the start of the prompt, as OpenAI's does: without echo too, the first generated
    token has the offset that is the prompt's length.
    """

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, options: AnswerOptions, num_samples: int) -> None:
        super().__init__(options, num_samples)
        self._offsets: dict[int, _TextOffset] = {}

    def _choice(self, prompt_index: int, delta: pb.SampleDelta) -> Json:
        return {
            "index": self._index(prompt_index, delta),
            "text": delta.text,
            "logprobs": self._logprobs(prompt_index, delta) if self._options.logprobs else None,
            **self._finish(delta),
        }

    def _chunk_choices(self, prompt_index: int, delta: pb.SampleDelta) -> Iterable[str]:
        index = self._index(prompt_index, delta)
        if delta.text or delta.logprobs:
            logprobs = _dumps(self._logprobs(prompt_index, delta)) if delta.logprobs else "null"
            yield f'{{"index":{index},"text":{_dumps(delta.text)},"logprobs":{logprobs},"finish_reason":null}}'
        if delta.finish_reason:
            yield _dumps({"index": index, "text": "", "logprobs": None, **self._finish(delta)})

    def _logprobs(self, prompt_index: int, delta: pb.SampleDelta) -> Json:
        index = self._index(prompt_index, delta)
        if index not in self._offsets:
            self._offsets[index] = _TextOffset(self._options.prompt_lengths[prompt_index])
        offset = self._offsets[index]
        tokens, offsets, token_logprobs, top_logprobs = [], [], [], []
        for entry in delta.logprobs:
            data = self._options.token_bytes(entry.token_id)
            token, logprob = _token_text(data), _finite(entry.logprob)
            tokens.append(token)
            offsets.append(offset.of(data))
            token_logprobs.append(logprob)
            # The sampled token is always there; where two tokens have one text, the likelier one is.
            top: dict[str, float] = {}
            for likely in entry.top:
                top.setdefault(self._token(likely.token_id), _finite(likely.logprob))
            top.setdefault(token, logprob)
            top_logprobs.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions, num_samples: int) -> None:
        super().__init__(options, num_samples)
        self._begun: set[int] = set()

    def _choice(self, prompt_index: int, delta: pb.SampleDelta) -> Json:
        return {
            "index": self._index(prompt_index, delta),
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta) if self._options.logprobs else None,
            **self._finish(delta),
        }

    def _chunk_choices(self, prompt_index: int, delta: pb.SampleDelta) -> Iterable[str]:
        index = self._index(prompt_index, delta)
        if index not in self._begun:
            self._begun.add(index)
            yield (
                f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'
            )
        if delta.text or delta.logprobs:
            logprobs = _dumps(self._logprobs(delta)) if delta.logprobs else "null"
            yield (
                f'{{"index":{index},"delta":{{"content":{_dumps(delta.text)}}},'
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
        return {"token": _token_text(data), "logprob": _finite(entry.logprob), "bytes": list(data)}


class _TextOffset:
    """Where tokens begin in the text, in characters. A token that goes on with a character begins where it does."""

    def __init__(self, start: int) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, data: bytes) -> int:
        """The offset of the next token, whose bytes these are."""
        offset = self._offset
        self._offset += len(self._decoder.decode(data))
        return offset


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


def _token_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    # The comparison is false for NaN too.
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


# Line ends to Unicode, though not to JSON or to events. Clients that split an event stream with their language's own
# idea of lines would cut an event at them; escaped they are the same text.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def _dumps(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text if text.isascii() else text.translate(_LINE_ENDS)
