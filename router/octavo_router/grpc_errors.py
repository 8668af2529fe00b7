"""Errors as rich gRPC statuses: the code of `ERROR_TABLE`, with google.rpc details.

Every status carries ErrorInfo (domain and reason); a wrong field comes with BadRequest, an overload, and an outage that
will end, with RetryInfo.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from octavo.errors import (
    ERROR_DOMAIN,
    InternalError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
    mapping_of,
)

logger = logging.getLogger(__name__)

# gRPC's clients drop a status whose trailers exceed 8 KiB. They hold the message three times, once with three bytes for
# each one beyond ASCII and twice in base64.
MAX_MESSAGE_BYTES = 1024


def status_message(error: OctavoError) -> status_pb2.Status:
    """The google.rpc.Status of an error. A message above MAX_MESSAGE_BYTES is cut."""
    mapping, text = mapping_of(error), _cut(error.message)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=mapping.reason, domain=ERROR_DOMAIN)]
    if isinstance(error, InvalidRequestError) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverloadedError | UnavailableError) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(
        code=mapping.grpc_code.value[0], message=text, details=[_packed(detail) for detail in details]
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OctavoError) -> NoReturn:
    """Ends a call with an error's status. Raises grpc.aio.AbortError, which the handler must let pass."""
    status = rpc_status.to_status(status_message(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


def internal_error(error: Exception) -> InternalError:
    """What a caller learns of an exception that nobody expected; the log gets all of it."""
    logger.error("unexpected error in a call", exc_info=error)
    return InternalError("internal error; the server's log has the details")


def _cut(message: str) -> str:
    data = message.encode(errors="replace")
    return message if len(data) <= MAX_MESSAGE_BYTES else data[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
