"""Errors as HTTP responses in OpenAI's shape, by `ERROR_TABLE`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from octavo.errors import (
    InternalError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
    mapping_of,
)
from octavo_router.openai_requests import param_of

logger = logging.getLogger(__name__)


def error_body(error: OctavoError, name_of: Callable[[str], str] = param_of) -> bytes:
    """{"error": {message, type, param, code}} as JSON. name_of: what the route calls a field of the contract."""
    mapping = mapping_of(error)
    param = name_of(error.field) if isinstance(error, InvalidRequestError) and error.field else None
    return _body(error.message, mapping.openai_type, param, mapping.reason.lower())


def error_response(error: OctavoError, name_of: Callable[[str], str] = param_of) -> Response:
    """The response for an error; an overload, and an outage that will end, say in Retry-After when to come again, in
    whole seconds."""
    headers = {}
    if isinstance(error, OverloadedError | UnavailableError) and error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(error_body(error, name_of), mapping_of(error).http_status, headers, "application/json")


def status_response(status: HTTPStatus, message: str, headers: dict[str, str] | None = None) -> Response:
    """The response for what is wrong with HTTP itself: no such route, a wrong method."""
    return Response(status_body(status, message), status, headers, "application/json")


def status_body(status: HTTPStatus, message: str) -> bytes:
    """What `status_response` says."""
    return _body(message, "invalid_request_error", None, status.phrase.lower().replace(" ", "_"))


def internal_error(error: Exception) -> InternalError:
    """What a caller learns of an exception that nobody expected; the log gets all of it."""
    logger.error("unexpected error in a request", exc_info=error)
    return InternalError("internal error; the server's log has the details")


def _body(message: str, kind: str, param: str | None, code: str) -> bytes:
    content: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": content}, ensure_ascii=False).encode("utf-8", "backslashreplace")
