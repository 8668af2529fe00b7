"""The HTTP API as an OpenAPI document: every operation, what it takes, and what it may answer.

The application's routes are made from OPERATIONS, so that a path without a description cannot exist. Bodies are
described by the models that check them, answers by `openapi_answers.py`, errors by `ERROR_TABLE`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from octavo.errors import (
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OctavoError,
    OverloadedError,
    RequestTooLargeError,
    UnavailableError,
    mapping_of,
)
from octavo_router import __version__
from octavo_router.http_security import OPEN_PATHS
from octavo_router.openai_responses_schema import ResponsesBody
from octavo_router.openai_schema import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo_router.openapi_answers import ANSWERS
from octavo_router.openapi_ranges import with_ranges

_SCHEMAS = "#/components/schemas/"
_JSON, _EVENTS, _TEXT, _HTML = "application/json", "text/event-stream", "text/plain", "text/html"

Json = dict[str, Any]
Errors = tuple[type[OctavoError], ...]

_SERVING: Errors = (UnavailableError, InternalError)
_INFERENCE: Errors = (InvalidRequestError, RequestTooLargeError, ModelNotFoundError, *_SERVING)
_GENERATION: Errors = (*_INFERENCE, OverloadedError)

_DESCRIPTIONS: dict[type[OctavoError], str] = {
    InvalidRequestError: "The request is wrong, too long for the model, or asks for what is not offered.",
    RequestTooLargeError: "The body has more bytes than the server takes.",
    AuthenticationError: "The server wants an API key, and none was given or an unknown one.",
    ModelNotFoundError: "No model of this name is served.",
    OverloadedError: "A queue is full; Retry-After says when to come again.",
    UnavailableError: "No worker answers yet, or the server is stopping.",
    InternalError: "The request failed while it ran.",
}


@dataclass(frozen=True)
class Operation:
    """One method of one path. name: its handler's and its operationId; answer: a name in ANSWERS; events: a name in
    ANSWERS of what a stream's events hold; unready: 503 has the answer's schema instead of an error's.
    """

    method: str
    path: str
    name: str
    summary: str
    body: type[BaseModel] | None = None
    answer: str = ""
    media_type: str = _JSON
    events: str = ""
    errors: Errors = ()
    unready: bool = False

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/completions",
        "completions",
        "Completes prompts.",
        body=CompletionBody,
        answer="Completion",
        events="CompletionChunk",
        errors=_GENERATION,
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        "chat_completions",
        "Answers a conversation.",
        body=ChatCompletionBody,
        answer="ChatCompletion",
        events="ChatCompletionChunk",
        errors=_GENERATION,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "responses",
        "Answers a conversation, as the Responses API has it. The server keeps no responses.",
        body=ResponsesBody,
        answer="Response",
        events="ResponseEvent",
        errors=_GENERATION,
    ),
    Operation("GET", "/v1/models", "models", "Lists what `model` may be.", answer="ModelList", errors=_SERVING),
    Operation(
        "GET",
        "/v1/models/{model:path}",
        "model",
        "Tells about one model.",
        answer="Model",
        errors=(ModelNotFoundError, *_SERVING),
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        "Token ids of a prompt or of messages.",
        body=TokenizeBody,
        answer="Tokens",
        errors=_INFERENCE,
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        "Text of token ids.",
        body=DetokenizeBody,
        answer="Text",
        errors=_INFERENCE,
    ),
    Operation("GET", "/health", "health", "200 as long as the process serves at all.", answer="Status"),
    Operation(
        "GET",
        "/ready",
        "ready",
        "200 while requests are taken, 503 while no worker answers and while the server drains.",
        answer="Status",
        unready=True,
    ),
    Operation("GET", "/metrics", "metrics", "Counters and gauges in Prometheus' text format.", media_type=_TEXT),
    Operation("GET", "/version", "version", "The server's version.", answer="Version"),
    Operation("GET", "/openapi.json", "openapi_document", "This document.", answer="Document"),
    Operation("GET", "/docs", "docs", "This document as a page.", media_type=_HTML),
)


@functools.cache
def document() -> Json:
    """The OpenAPI document, version 3.1. To be read only."""
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.template, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": __version__,
            "description": "OpenAI's API with vLLM's additions. `null` is the same as leaving a field out.",
        },
        "paths": paths,
        "components": {
            "schemas": ANSWERS | _body_schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Keys are asked for only where the server was started with some.
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation) -> Json:
    result: Json = {"operationId": operation.name, "summary": operation.summary, "responses": _responses(operation)}
    if operation.path in OPEN_PATHS:
        result["security"] = []
    if operation.body is not None:
        content = {_JSON: {"schema": _ref(operation.body.__name__)}}
        result["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in operation.template.split("/") if part.startswith("{")]
    if names:
        result["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return result


def _responses(operation: Operation) -> Json:
    schema = _ref(operation.answer) if operation.answer else {"type": "string"}
    content: Json = {operation.media_type: {"schema": schema}}
    if operation.events:
        content[_EVENTS] = {"schema": _event(operation)}
    responses: Json = {"200": {"description": operation.summary, "content": content}}
    if operation.unready:
        responses["503"] = {"description": "Not ready.", "content": {_JSON: {"schema": schema}}}
    keyed: Errors = () if operation.path in OPEN_PATHS else (AuthenticationError,)
    for error in (*keyed, *operation.errors):
        status = str(mapping_of(error("")).http_status.value)
        responses[status] = {
            "description": _DESCRIPTIONS[error],
            "content": {_JSON: {"schema": _ref("Error")}},
        }
        if error in (OverloadedError, UnavailableError):
            responses[status]["headers"] = {
                "Retry-After": {"description": "Seconds until another try makes sense.", "schema": {"type": "integer"}}
            }
    return responses


def _event(operation: Operation) -> Json:
    """The schema of each server-sent event of a stream: OpenAPI 3.1 has no words for the stream as a whole."""
    kinds = [_ref(operation.events)]
    data: list[Json] = []
    if operation.events != "ResponseEvent":
        # Responses end with an event of their own, and so do failed ones.
        kinds.append(_ref("Error"))
        data.append({"const": "[DONE]"})
    data.append({"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": kinds}})
    return {
        "type": "object",
        "description": f"With `stream`: each event. Its data is {operation.events} as JSON.",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": data}},
        "required": ["data"],
    }


def _body_schemas() -> Json:
    """The bodies' JSON schemas and those that they refer to, by name."""
    schemas: Json = {}
    for operation in OPERATIONS:
        if operation.body is not None:
            schema = operation.body.model_json_schema(ref_template=_SCHEMAS + "{model}")
            schemas |= schema.pop("$defs", {})
            schemas[operation.body.__name__] = with_ranges(schema) if operation.events else schema
    return schemas


def _ref(name: str) -> Json:
    return {"$ref": _SCHEMAS + name}
