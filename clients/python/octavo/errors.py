"""Every error that Octavo raises to its callers, and the one table from errors to status codes.

    OctavoError
    ├── InvalidRequestError        the request itself is wrong; names the field
    │   ├── ContextLengthError     prompt or prompt + max_tokens over the limit
    │   ├── RequestTooLargeError   more bytes than the server takes
    │   └── UnsupportedError       a field of the contract that this server does not offer
    ├── AuthenticationError        no key, or a wrong one
    ├── ModelNotFoundError         no such model is served
    ├── ResumeMismatchError        a resume that does not fit the server's model or the request
    ├── OverloadedError            a queue is full; says when to try again
    ├── UnavailableError           draining, or no worker
    ├── DeadlineError              the caller's deadline passed
    ├── RequestCancelledError      the caller went away or cancelled
    ├── GenerationError            this request failed while it ran; others did not
    ├── ModelLoadError             a model that cannot be loaded (raised at start, not to clients)
    ├── ConfigError                a setting that is out of range (raised at start)
    ├── StartError                 a router or worker that could not be started, or kept dying
    └── InternalError              a bug of ours

The front ends turn errors into statuses and the Python client turns statuses back into errors, both by `ERROR_TABLE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import grpc

ERROR_DOMAIN = "octavo.v1"


class OctavoError(Exception):
    """The root. `message` is written for the caller: it names the value and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequestError(OctavoError):
    """The request is wrong. `field` is its name in the contract, such as "sampling.temperature"; empty if none fits."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """The request has more tokens than the model's context or the KV pool can hold."""


class RequestTooLargeError(InvalidRequestError):
    """The request has more bytes than the server takes."""


class UnsupportedError(InvalidRequestError):
    """The request uses a part of the contract that this server does not offer."""


class AuthenticationError(OctavoError):
    """No key was given where one is needed, or an unknown one."""


class ModelNotFoundError(OctavoError):
    """The request names a model that is not served."""


class ResumeMismatchError(OctavoError):
    """A resume does not fit the served model or the request."""


class OverloadedError(OctavoError):
    """A queue is full. `retry_after_s` is when another try makes sense, in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(OctavoError):
    """The server drains, or no worker can be reached. `retry_after_s` is when another try makes sense, in seconds; None
    where nobody knows.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(OctavoError):
    """The caller's deadline passed before the request ended."""


class RequestCancelledError(OctavoError):
    """The caller cancelled."""


class GenerationError(OctavoError):
    """This request failed while it ran, for a reason of its own."""


class ModelLoadError(OctavoError):
    """A model cannot be found or read."""


class ConfigError(OctavoError):
    """A setting has a wrong value. The message names key and value."""


class StartError(OctavoError):
    """A router or worker could not be started, or died again and again.

    `exit_code` is the program's, None where it did not end by itself; 2 says that its settings or its model are at
    fault.
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class InternalError(OctavoError):
    """Something that should not happen did."""


@dataclass(frozen=True)
class ErrorMapping:
    """How one kind of error looks on each front end.

    reason: google.rpc.ErrorInfo.reason; openai_type: `error.type` in an OpenAI body.
    """

    grpc_code: grpc.StatusCode
    http_status: HTTPStatus
    openai_type: str
    reason: str


ERROR_TABLE: dict[type[OctavoError], ErrorMapping] = {
    InvalidRequestError: ErrorMapping(
        grpc.StatusCode.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST, "invalid_request_error", "INVALID_REQUEST"
    ),
    ContextLengthError: ErrorMapping(
        grpc.StatusCode.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST, "invalid_request_error", "CONTEXT_LENGTH_EXCEEDED"
    ),
    UnsupportedError: ErrorMapping(
        grpc.StatusCode.UNIMPLEMENTED, HTTPStatus.BAD_REQUEST, "invalid_request_error", "UNSUPPORTED"
    ),
    AuthenticationError: ErrorMapping(
        grpc.StatusCode.UNAUTHENTICATED, HTTPStatus.UNAUTHORIZED, "authentication_error", "UNAUTHENTICATED"
    ),
    ModelNotFoundError: ErrorMapping(
        grpc.StatusCode.NOT_FOUND, HTTPStatus.NOT_FOUND, "not_found_error", "MODEL_NOT_FOUND"
    ),
    ResumeMismatchError: ErrorMapping(
        grpc.StatusCode.FAILED_PRECONDITION, HTTPStatus.CONFLICT, "invalid_request_error", "RESUME_MISMATCH"
    ),
    OverloadedError: ErrorMapping(
        grpc.StatusCode.RESOURCE_EXHAUSTED, HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "OVERLOADED"
    ),
    RequestTooLargeError: ErrorMapping(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "invalid_request_error",
        "REQUEST_TOO_LARGE",
    ),
    UnavailableError: ErrorMapping(
        grpc.StatusCode.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error", "UNAVAILABLE"
    ),
    DeadlineError: ErrorMapping(
        grpc.StatusCode.DEADLINE_EXCEEDED, HTTPStatus.GATEWAY_TIMEOUT, "timeout_error", "DEADLINE_EXCEEDED"
    ),
    RequestCancelledError: ErrorMapping(
        grpc.StatusCode.CANCELLED, HTTPStatus.REQUEST_TIMEOUT, "request_cancelled_error", "CANCELLED"
    ),
    GenerationError: ErrorMapping(
        grpc.StatusCode.ABORTED, HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "GENERATION_FAILED"
    ),
    ModelLoadError: ErrorMapping(
        grpc.StatusCode.FAILED_PRECONDITION, HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "MODEL_LOAD"
    ),
    ConfigError: ErrorMapping(
        grpc.StatusCode.FAILED_PRECONDITION, HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "CONFIG"
    ),
    StartError: ErrorMapping(
        grpc.StatusCode.FAILED_PRECONDITION, HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "START"
    ),
    InternalError: ErrorMapping(grpc.StatusCode.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "INTERNAL"),
}


def mapping_of(error: OctavoError) -> ErrorMapping:
    """The row of `ERROR_TABLE` for an error: its class's, or its nearest ancestor's that has one."""
    for cls in type(error).__mro__:
        if cls in ERROR_TABLE:
            return ERROR_TABLE[cls]
    return ERROR_TABLE[InternalError]
