"""Requests over gRPC that cannot be read, as the caller's error.

gRPC itself answers UNKNOWN where a message's bytes are no message, which says that the server is at fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from octavo.errors import InvalidRequestError
from octavo_router import grpc_errors

Context = grpc.aio.ServicerContext[Any, Any]


class _Unreadable:
    """What a request becomes whose bytes are no message of its type."""


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose request cannot be read with INVALID_ARGUMENT. on_unreadable is told the call's path."""

    def __init__(self, on_unreadable: Callable[[str], None]) -> None:
        self._on_unreadable = on_unreadable

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        work, decode = getattr(handler, kind), handler.request_deserializer
        if not inspect.iscoroutinefunction(work):
            return handler

        def decoded(data: bytes) -> Any:
            try:
                return decode(data)
            except DecodeError:
                return _Unreadable()

        async def answered(request: Any, context: Context) -> Any:
            if isinstance(request, _Unreadable):
                self._on_unreadable(handler_call_details.method)
                error = InvalidRequestError(
                    "the request's bytes are no message of its type: send one that is serialized as the contract "
                    "defines it, with strings in UTF-8"
                )
                await grpc_errors.abort(context, error)
            return await work(request, context)

        return handler._replace(request_deserializer=decoded, **{kind: answered})
