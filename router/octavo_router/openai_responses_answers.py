"""Turns GenerateResponses into the Responses API's JSON: whole responses, and the typed events of a stream.

Both come from one account of the output, so that they cannot differ: a whole response is a stream whose events nobody
reads. A stream ends with response.completed, response.incomplete or response.failed; behind the last there is an
`error` event, on which OpenAI's clients raise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.v1 import inference_pb2 as pb
from octavo_router.json_text import dumps
from octavo_router.openai_logprobs import finite, token_text
from octavo_router.openai_responses import param_of, wants_logprobs
from octavo_router.openai_responses_schema import ResponsesBody

Json = dict[str, Any]


@dataclass(frozen=True)
class ResponseOptions:
    """What a response is made with.

    request_id: what the names of the response and its items are made of; model: the name the client used; echoed: the
    fields that repeat the request; logprobs: text has its log-probabilities; token_bytes: the bytes of a token's text;
    created_at: in seconds since 1970.
    """

    request_id: str
    model: str
    echoed: Json
    logprobs: bool
    token_bytes: Callable[[int], bytes]
    created_at: int = field(default_factory=lambda: int(time.time()))


def response_options(
    body: ResponsesBody,
    request: pb.GenerateRequest,
    *,
    model: str,
    token_bytes: Callable[[int], bytes],
) -> ResponseOptions:
    """The options for the response to a body, whose request this is."""
    return ResponseOptions(
        request_id=request.request_id,
        model=model,
        echoed=_echoed(body),
        logprobs=wants_logprobs(body),
        token_bytes=token_bytes,
    )


class ResponseAnswer:
    """/v1/responses."""

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._output: list[_Item] = []
        self._open: _Item | None = None
        self._calls: dict[int, _Item] = {}
        self._usage = pb.Usage()
        self._finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self._sequence_number = 0

    def whole(self, responses: Sequence[pb.GenerateResponse]) -> bytes:
        """The body of a response that does not stream."""
        for response in responses:
            self.events(0, response)
        return dumps(self._ended_response()).encode()

    def events(self, prompt_index: int, response: pb.GenerateResponse) -> bytes:
        """The events that a response of the contract gives."""
        events: list[str] = []
        if not self._sequence_number:
            for kind in ("response.created", "response.in_progress"):
                events.append(self._event(kind, response=self._response("in_progress")))
        if response.HasField("usage"):
            self._usage.CopyFrom(response.usage)
        for delta in response.deltas:
            events += self._delta_events(delta)
        return "".join(events).encode()

    def last_events(self) -> bytes:
        """The event that ends a stream well: response.completed or response.incomplete."""
        response = self._ended_response()
        return self._event(f"response.{response['status']}", response=response).encode()

    def failure_events(self, error_body: bytes) -> bytes:
        """response.failed, and an error event."""
        error: Json = json.loads(error_body)["error"]
        if self._open is not None:
            self._open.status = "incomplete"
        code = "rate_limit_exceeded" if error["type"] == "rate_limit_error" else "server_error"
        failed = self._response("failed", error={"code": code, "message": error["message"]})
        events = self._event("response.failed", response=failed)
        told = {name: error[name] for name in ("code", "message", "param")}
        return (events + self._event("error", **told, error=error)).encode()

    def param_of(self, field: str) -> str:
        """The name in a body of /v1/responses of a field of the contract."""
        return param_of(field)

    def _delta_events(self, delta: pb.SampleDelta) -> Iterator[str]:
        # Of a request with tools whose answer cannot call any, the text is not read for calls.
        is_parsed = delta.HasField("parsed")
        text = delta.parsed.content if is_parsed else delta.text
        logprobs = self._logprobs(delta) if self._options.logprobs else []
        if text or (logprobs and not is_parsed):
            yield from self._add_text(text, logprobs)
        for call in delta.parsed.tool_calls:
            yield from self._add_call(call)
        if delta.finish_reason:
            self._finish_reason = delta.finish_reason
            if not self._output:
                yield from self._add_text("", [])
            status = "incomplete" if delta.finish_reason == pb.FINISH_REASON_LENGTH else "completed"
            yield from self._close(status)

    def _add_text(self, text: str, logprobs: list[Json]) -> Iterator[str]:
        item = self._open
        if not isinstance(item, _MessageItem):
            yield from self._close("completed")
            item = _MessageItem(f"msg_{self._options.request_id}_{len(self._output)}", len(self._output))
            yield self._begin(item)
            yield self._event("response.content_part.added", **item.place, part=item.part())
        item.texts.append(text)
        item.logprobs += logprobs
        if text or logprobs:
            yield self._event("response.output_text.delta", **item.place, delta=text, logprobs=logprobs)

    def _add_call(self, call: pb.ToolCallDelta) -> Iterator[str]:
        item = self._calls.get(call.index)
        if item is None:
            yield from self._close("completed")
            item = _CallItem(
                f"fc_{self._options.request_id}_{len(self._output)}", len(self._output), call.id, call.name
            )
            self._calls[call.index] = item
            yield self._begin(item)
        assert isinstance(item, _CallItem)
        if call.arguments_json:
            item.arguments.append(call.arguments_json)
            yield self._event("response.function_call_arguments.delta", **item.place, delta=call.arguments_json)

    def _begin(self, item: _Item) -> str:
        self._output.append(item)
        self._open = item
        return self._event("response.output_item.added", output_index=item.index, item=item.json())

    def _close(self, status: str) -> Iterator[str]:
        """Ends the item that is open, if one is."""
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        if isinstance(item, _MessageItem):
            text = {"text": item.text, "logprobs": item.logprobs}
            yield self._event("response.output_text.done", **item.place, **text)
            yield self._event("response.content_part.done", **item.place, part=item.part())
        else:
            call = item.json()
            told = {name: call[name] for name in ("arguments", "name")}
            yield self._event("response.function_call_arguments.done", **item.place, **told)
        yield self._event("response.output_item.done", output_index=item.index, item=item.json())

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: {kind}\ndata: {dumps(event)}\n\n"

    def _ended_response(self) -> Json:
        if self._finish_reason == pb.FINISH_REASON_LENGTH:
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"})
        return self._response("completed")

    def _response(self, status: str, **fields: Any) -> Json:
        options, usage = self._options, self._usage
        ended = status in ("completed", "incomplete")
        return {
            "id": f"resp_{options.request_id}",
            "object": "response",
            "created_at": options.created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": options.model,
            "output": [item.json() for item in self._output],
            "usage": _usage(usage) if ended else None,
            **options.echoed,
            **fields,
        }

    def _logprobs(self, delta: pb.SampleDelta) -> list[Json]:
        return [
            self._entry(entry) | {"top_logprobs": [self._entry(likely) for likely in entry.top]}
            for entry in delta.logprobs
        ]

    def _entry(self, entry: pb.TokenLogprobs | pb.TopLogprob) -> Json:
        data = self._options.token_bytes(entry.token_id)
        return {"token": token_text(data), "logprob": finite(entry.logprob), "bytes": list(data)}


class _MessageItem:
    """A message of the model's, with one part of text."""

    def __init__(self, id: str, index: int) -> None:
        self.index = index
        self.place: Json = {"item_id": id, "output_index": index, "content_index": 0}
        self.status = "in_progress"
        self.texts: list[str] = []
        self.logprobs: list[Json] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def json(self) -> Json:
        return {
            "id": self.place["item_id"],
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [self.part()] if self.texts else [],
        }


class _CallItem:
    """A call of a function."""

    def __init__(self, id: str, index: int, call_id: str, name: str) -> None:
        self.index = index
        self.place: Json = {"item_id": id, "output_index": index}
        self.status = "in_progress"
        self.arguments: list[str] = []
        self._call_id = call_id
        self._name = name

    def json(self) -> Json:
        return {
            "id": self.place["item_id"],
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self.arguments),
        }


_Item = _MessageItem | _CallItem


def _echoed(body: ResponsesBody) -> Json:
    """The fields of a response that repeat its request, with what unset ones mean."""
    text_format: Json = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        text_format = body.text.format.model_dump(by_alias=True, exclude_none=True)
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": bool(tool.strict),
        }
        for tool in body.tools or ()
    ]
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text_format, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_token_count,
        "input_tokens_details": {"cached_tokens": usage.cached_token_count, "cache_write_tokens": 0},
        "output_tokens": usage.completion_token_count,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_token_count + usage.completion_token_count,
    }
