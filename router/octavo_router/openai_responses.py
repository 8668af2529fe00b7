"""Turns bodies of /v1/responses into GenerateRequests, by way of chat completions.

A response is a chat completion in other words: the same conversation, tools and formats under other names. So a body
becomes that of a chat completion, whose meaning `openai_requests.py` knows, and names in errors are turned back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from octavo.errors import InvalidRequestError, UnsupportedError
from octavo.v1 import inference_pb2 as pb
from octavo_router import openai_requests
from octavo_router.openai_body import parse_body, shown
from octavo_router.openai_responses_schema import (
    INCLUDABLE,
    LOGPROBS,
    ROLES,
    InputItem,
    ResponsesBody,
    TextFormat,
)
from octavo_router.openai_schema import ChatCompletionBody

Json = dict[str, Any]

# Fields of the same name and meaning on both routes.
_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "stream",
    "user",
)
# Names of chat completions that are others here. What is within messages has other places in the input.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "sampling.grammar": "text.format",
    "grammar": "text.format",
}


def responses_request(body: ResponsesBody, request_id: str) -> pb.GenerateRequest:
    """The request of a response. Raises InvalidRequestError for a value that cannot be meant and UnsupportedError for
    what is not offered, naming fields of the body.
    """
    _check_offered(body)
    chat: Json = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    chat["messages"] = _messages(body)
    if body.max_output_tokens is not None:
        if body.max_output_tokens < 1:
            raise InvalidRequestError(
                f"max_output_tokens is {body.max_output_tokens}; it must be at least 1", field="max_output_tokens"
            )
        chat["max_completion_tokens"] = body.max_output_tokens
    if wants_logprobs(body):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    if body.tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True),
            }
            for tool in body.tools
        ]
    if body.tool_choice is not None:
        named = isinstance(body.tool_choice, dict)
        chat["tool_choice"] = (
            {"type": "function", "function": {"name": body.tool_choice["name"]}} if named else body.tool_choice
        )
    try:
        return openai_requests.chat_request(parse_body(ChatCompletionBody, json.dumps(chat).encode()), request_id)
    except InvalidRequestError as error:
        error.field = param_of(error.field)
        raise


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the answer has log-probabilities."""
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def param_of(field: str) -> str:
    """The name in a body of /v1/responses of a field of the contract or of a chat completion's body."""
    name = openai_requests.param_of(field)
    head = name.partition("[")[0].partition(".")[0]
    if head in ("tools", "tool_choice"):
        return name.replace(".function", "")
    return _NAMES.get(name) or _NAMES.get(head) or name


def _check_offered(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise UnsupportedError(
                f"{name} is not offered: this server keeps no responses; send the conversation so far in input",
                field=name,
            )
    if body.store:
        raise UnsupportedError(
            "store is not offered: this server keeps no responses; set it to false or leave it out", field="store"
        )
    body.check_offered()
    if body.text is not None:
        body.text.check_offered("text.")
    if body.reasoning is not None:
        body.reasoning.check_offered("reasoning.")
    if body.stream_options is not None:
        if not body.stream:
            raise InvalidRequestError(
                "stream_options is given without stream; set stream to true", field="stream_options"
            )
        body.stream_options.check_offered("stream_options.")
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise UnsupportedError(
                f"include holds {shown(name)}, which is not offered; possible: {', '.join(INCLUDABLE)}", field="include"
            )


def _messages(body: ResponsesBody) -> list[Json]:
    """The conversation as chat messages. Calls that follow each other, or a text of the model's, are one turn."""
    if not body.input:
        raise InvalidRequestError("input is an empty list; give at least one item", field="input")
    messages: list[Json] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for index, item in enumerate(body.input):
        if item.type == "function_call":
            name, call_id, arguments = _required(item, index, ("name", "call_id", "arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            )
        elif item.type == "function_call_output":
            call_id, output = _required(item, index, ("call_id", "output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(output)})
        else:
            role, content = _required(item, index, ("role", "content"))
            if role not in ROLES:
                raise InvalidRequestError(
                    f"input[{index}].role is {shown(role)}; it must be one of {', '.join(ROLES)}",
                    field=f"input[{index}].role",
                )
            messages.append({"role": "system" if role == "developer" else role, "content": _content(content)})
    return messages


def _required(item: InputItem, index: int, names: Iterable[str]) -> list[Any]:
    """The values of fields that an item of its type must have. Raises InvalidRequestError for one that is missing."""
    values = []
    for name in names:
        if (value := getattr(item, name)) is None:
            path = f"input[{index}].{name}"
            raise InvalidRequestError(f"{path} is missing; a {item.type or 'message'} must have it", field=path)
        values.append(value)
    return values


def _content(content: str | list[str]) -> str | list[Json]:
    return content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]


def _response_format(text_format: TextFormat) -> Json:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    if text_format.name is None or text_format.schema_ is None:
        missing = "name" if text_format.name is None else "schema"
        raise InvalidRequestError(
            f"text.format.{missing} is missing; a format of type json_schema must have it",
            field=f"text.format.{missing}",
        )
    schema = text_format.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema | {"schema": text_format.schema_}}
