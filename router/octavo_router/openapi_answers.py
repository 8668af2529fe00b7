"""JSON schemas of what the HTTP API answers, for its OpenAPI document.

They say what is always there. Answers may gain fields; a client must not mind ones that it does not know.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_STRING: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_NULL: Json = {"type": "null"}


def _object(optional: Json | None = None, **required: Json) -> Json:
    """An object with these properties; those in `optional` may be missing."""
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def _array(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


def _const(value: str) -> Json:
    return {"const": value}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_LOGPROB = _object(token=_STRING, logprob=_NUMBER, bytes=_array(_COUNT))
_CHAT_LOGPROBS = _object(
    content=_array(
        _object(token=_STRING, logprob=_NUMBER, bytes=_array(_COUNT), top_logprobs=_array(_ref("TokenLogprob")))
    )
)
_COMPLETION_LOGPROBS = _object(
    tokens=_array(_STRING),
    token_logprobs=_array(_or_null(_NUMBER)),
    top_logprobs=_array(_or_null({"type": "object", "additionalProperties": _NUMBER})),
    text_offset=_array(_COUNT),
)
_FINISH_REASON: Json = {"enum": ["stop", "length", "tool_calls"]}
_STOP_REASON: Json = {"type": ["string", "integer", "null"]}
_TOOL_CALL = _object(
    {"index": _COUNT}, id=_STRING, type=_const("function"), function=_object(name=_STRING, arguments=_STRING)
)
_TOOL_CALL_DELTA = _object(
    {"id": _STRING, "type": _const("function"), "function": _object({"name": _STRING, "arguments": _STRING})},
    index=_COUNT,
)
_MESSAGE = _object(
    {"tool_calls": _array(_TOOL_CALL)}, role=_const("assistant"), content=_or_null(_STRING), refusal=_NULL
)
_DELTA = _object({"role": _STRING, "content": _or_null(_STRING), "tool_calls": _array(_TOOL_CALL_DELTA)})

_OUTPUT_TEXT = _object(
    type=_const("output_text"),
    text=_STRING,
    annotations=_array({}),
    logprobs=_array(_object(token=_STRING, logprob=_NUMBER, bytes=_array(_COUNT), top_logprobs=_array(_LOGPROB))),
)
_ITEM_STATUS: Json = {"enum": ["in_progress", "completed", "incomplete"]}


def _answer(kind: str, choice: Json, *, usage: Json | None = None) -> Json:
    head = {"id": _STRING, "object": _const(kind), "created": _COUNT, "model": _STRING, "system_fingerprint": _STRING}
    body = head | {"choices": _array(choice)}
    return _object({"usage": _or_null(_ref("Usage"))}, **body) if usage is None else _object(**body, usage=usage)


ANSWERS: Json = {
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_or_null(_STRING), code=_STRING),
    ),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "TokenLogprob": _LOGPROB,
    "Completion": _answer(
        "text_completion",
        _object(
            index=_COUNT,
            text=_STRING,
            logprobs=_or_null(_COMPLETION_LOGPROBS),
            finish_reason=_FINISH_REASON,
            stop_reason=_STOP_REASON,
        ),
        usage=_ref("Usage"),
    ),
    "CompletionChunk": _answer(
        "text_completion",
        _object(
            {"stop_reason": _STOP_REASON},
            index=_COUNT,
            text=_STRING,
            logprobs=_or_null(_COMPLETION_LOGPROBS),
            finish_reason=_or_null(_FINISH_REASON),
        ),
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        _object(
            index=_COUNT,
            message=_MESSAGE,
            logprobs=_or_null(_CHAT_LOGPROBS),
            finish_reason=_FINISH_REASON,
            stop_reason=_STOP_REASON,
        ),
        usage=_ref("Usage"),
    ),
    "ChatCompletionChunk": _answer(
        "chat.completion.chunk",
        _object(
            {"stop_reason": _STOP_REASON},
            index=_COUNT,
            delta=_DELTA,
            logprobs=_or_null(_CHAT_LOGPROBS),
            finish_reason=_or_null(_FINISH_REASON),
        ),
    ),
    "Response": _object(
        id=_STRING,
        object=_const("response"),
        created_at=_COUNT,
        status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
        error=_or_null(_object(code=_STRING, message=_STRING)),
        incomplete_details=_or_null(_object(reason=_const("max_output_tokens"))),
        instructions=_or_null(_STRING),
        max_output_tokens=_or_null(_INTEGER),
        metadata={"type": "object", "additionalProperties": _STRING},
        model=_STRING,
        output=_array({"anyOf": [_ref("OutputMessage"), _ref("FunctionCall")]}),
        parallel_tool_calls={"type": "boolean"},
        previous_response_id=_NULL,
        store={"const": False},
        temperature=_or_null(_NUMBER),
        text={"type": "object"},
        tool_choice={"type": ["string", "object"]},
        tools=_array({"type": "object"}),
        top_p=_or_null(_NUMBER),
        usage=_or_null(
            _object(
                input_tokens=_COUNT,
                input_tokens_details=_object(cached_tokens=_COUNT),
                output_tokens=_COUNT,
                output_tokens_details=_object(reasoning_tokens=_COUNT),
                total_tokens=_COUNT,
            )
        ),
    ),
    "OutputMessage": _object(
        id=_STRING,
        type=_const("message"),
        status=_ITEM_STATUS,
        role=_const("assistant"),
        content=_array(_OUTPUT_TEXT),
    ),
    "FunctionCall": _object(
        id=_STRING,
        type=_const("function_call"),
        status=_ITEM_STATUS,
        call_id=_STRING,
        name=_STRING,
        arguments=_STRING,
    ),
    "ResponseEvent": _object({"response": _ref("Response")}, type=_STRING, sequence_number=_COUNT),
    "Model": _object(
        id=_STRING,
        object=_const("model"),
        created=_COUNT,
        owned_by=_STRING,
        root=_STRING,
        parent=_NULL,
        max_model_len=_COUNT,
    ),
    "ModelList": _object(object=_const("list"), data=_array(_ref("Model"))),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_array(_COUNT), token_strs=_or_null(_array(_STRING))),
    "Text": _object(prompt=_STRING),
    "Status": _object(status={"enum": ["live", "ready", "not ready"]}),
    "Version": _object(version=_STRING),
    "Document": _object(openapi=_STRING, info={"type": "object"}, paths={"type": "object"}),
}
