"""From a gRPC status back to the error the server raised.

The server's side of the same table is the router's. A status without Octavo's own details comes from the transport
(nobody listens, the connection broke) or from another program; its message then names the address and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from octavo.errors import (
    ERROR_DOMAIN,
    ERROR_TABLE,
    InternalError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
)

_DETAILS_KEY = "grpc-status-details-bin"
# How every gRPC library refuses a message above its limit. The code is an overload's, but another try has no use.
_TOO_LARGE = "larger than max"


class FailedCall(Protocol):
    """What the synchronous and the asynchronous errors of gRPC have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def error_of(call: FailedCall, address: str) -> OctavoError:
    """The typed error for a call that failed. `address` is where the call went, for the message."""
    code, message = call.code(), call.details() or ""
    info = error_details_pb2.ErrorInfo()
    violations = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in _status_of(call).details:
        for target in (info, violations, retry):
            if detail.Is(target.DESCRIPTOR):
                detail.Unpack(target)
    if info.domain != ERROR_DOMAIN and code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(
            f"cannot reach an Octavo server at {address}: is `octavo serve` running there? ({message or 'no answer'})"
        )
    if info.domain != ERROR_DOMAIN and code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        return InvalidRequestError(
            f"the request is larger than the server at {address} takes; send less, or start it with more "
            f"--max-request-bytes ({message})"
        )
    kind = _class_of(code, info.reason)
    if issubclass(kind, InvalidRequestError):
        field = violations.field_violations[0].field if violations.field_violations else info.metadata.get("field", "")
        return kind(message, field=field)
    if issubclass(kind, OverloadedError):
        seconds = retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else 1.0
        return kind(message, retry_after_s=seconds)
    if issubclass(kind, UnavailableError) and retry.HasField("retry_delay"):
        return kind(message, retry_after_s=retry.retry_delay.ToTimedelta().total_seconds())
    return kind(message or f"{code.name} from {address}")


def _class_of(code: grpc.StatusCode, reason: str) -> type[OctavoError]:
    """The class whose row has this reason; without one, the first row of the code: an ancestor stands before its
    children.
    """
    for cls, row in ERROR_TABLE.items():
        if row.reason == reason and row.grpc_code is code:
            return cls
    for cls, row in ERROR_TABLE.items():
        if row.grpc_code is code:
            return cls
    return InternalError


def _status_of(call: FailedCall) -> status_pb2.Status:
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
