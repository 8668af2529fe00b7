"""The gRPC front end: InferenceService, health and reflection on a TCP port and a Unix socket.

The servicer only carries messages between calls and the backend's `Inference`. AdminService is `admin.py`'s; what
statuses look like is `grpc_errors.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.authentication import AuthenticationInterceptor, KeyRing
from octavo.errors import ConfigError, OctavoError
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from octavo_router import grpc_errors
from octavo_router.backend import Backend
from octavo_router.grpc_decoding import DecodingInterceptor
from octavo_router.health import SERVICE_NAME as HEALTH_SERVICE
from octavo_router.health import HealthServicer
from octavo_router.metrics import REFUSED_INVALID, Metrics

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

INFERENCE_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

# Of one call, names and values; what exceeds it is refused by gRPC itself with RESOURCE_EXHAUSTED.
MAX_METADATA_BYTES = 16 << 10
# Calls of one connection that are under way at a time; a client library holds further ones back.
MAX_STREAMS = 8192

# Clients may ping every 5 s, with or without calls, and never get GOAWAY for it; the server itself pings idle
# connections, so that a stream that waits long for its first token is not cut by a proxy, and a dead peer is found.
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Two servers on one port would share its connections instead of failing.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", 20_000),
)
# Initial metadata by which a caller who has no response yet knows that its request was accepted.
ACCEPTED_METADATA = (("octavo-accepted", "1"),)
_REFUSAL = "no API key was sent, or one that is not known here; send one as metadata authorization: Bearer KEY"
_MAX_SOCKET_PATH = 100
_INT32_MAX = 2**31 - 1


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """InferenceService over the backend. A call's deadline becomes the request's; cancelling it cancels the request."""

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics

    # Written, not yielded: a generator that is cancelled while gRPC sends would end only when it is collected.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        async def work() -> None:
            with self._metrics.counting_refusals():
                inference = self._backend.inference
            responses = inference.generate(
                request,
                deadline=_deadline(context),
                on_accepted=lambda: context.send_initial_metadata(ACCEPTED_METADATA),
            )
            await _write_all(responses, context)

        await _answered(context, work())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async def work() -> pb.TokenizeResponse:
            return await self._backend.inference.tokenize(request)

        return await _answered(context, work())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async def work() -> pb.DetokenizeResponse:
            return await self._backend.inference.detokenize(request)

        return await _answered(context, work())

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async def work() -> pb.ListModelsResponse:
            return self._backend.inference.list_models()

        return await _answered(context, work())


class GrpcServer:
    """The server with everything on it. Bound when constructed, serving from `start` to `stop`."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        socket_path: str,
        max_request_bytes: int,
        metrics: Metrics,
        max_connections: int = 0,
        keys: KeyRing | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Binds the addresses. port 0 picks a free one and -1 none; an empty socket_path is none.

        max_connections: at a time; 0 is no limit. keys: what callers must send, of everything but health. credentials:
        for TLS on the port; the socket has none. Raises ConfigError for an address that cannot be bound.
        """
        options = (*_CHANNEL_OPTIONS, ("grpc.max_receive_message_length", min(max_request_bytes, _INT32_MAX)))
        if max_connections:
            options = (*options, ("grpc.max_allowed_incoming_connections", max_connections))
        guards: list[grpc.aio.ServerInterceptor] = [DecodingInterceptor(self._count_unreadable)]
        if keys:
            guards.insert(0, AuthenticationInterceptor(keys, refusal=_REFUSAL, on_refused=metrics.unauthenticated))
        self._metrics = metrics
        self._server = grpc.aio.server(options=options, interceptors=guards)
        self._health = HealthServicer(("", INFERENCE_SERVICE, ADMIN_SERVICE))
        self.port = _bind_port(self._server, host, port, credentials) if port >= 0 else -1
        if socket_path:
            _bind_socket(self._server, socket_path)

    async def start(self, backend: Backend, admin: admin_pb2_grpc.AdminServiceServicer) -> None:
        """Begins to serve. InferenceService is NOT_SERVING until `set_serving`."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(backend, self._metrics), self._server
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE_SERVICE, ADMIN_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._health.set_serving(ADMIN_SERVICE, True)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the server and of InferenceService; watchers hear of it."""
        for name in ("", INFERENCE_SERVICE):
            await self._health.set_serving(name, serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits up to grace_s for running ones and cancels the rest."""
        await self._health.close()
        await self._server.stop(grace_s)

    def _count_unreadable(self, path: str) -> None:
        if path == f"/{INFERENCE_SERVICE}/Generate":
            self._metrics.refused(REFUSED_INVALID)


async def _write_all(responses: AsyncGenerator[pb.GenerateResponse, None], context: Context) -> None:
    async with contextlib.aclosing(responses):
        async for response in responses:
            await context.write(response)


async def _answered(context: Context, work: Awaitable[T]) -> T:
    """The result of work; its errors end the call with a rich status."""
    try:
        return await work
    except OctavoError as error:
        await grpc_errors.abort(context, error)
    except grpc.aio.BaseError:
        raise
    except Exception as error:
        await grpc_errors.abort(context, grpc_errors.internal_error(error))


def _deadline(context: Context) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _bind_port(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(
            f"cannot serve gRPC on {address}: the port is in use or the address is not this machine's; "
            "choose another with --grpc-port (0 picks a free one) or stop what listens there"
        ) from None


def _bind_socket(server: grpc.aio.Server, path: str) -> None:
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(f"grpc_socket {path!r} is longer than {_MAX_SOCKET_PATH} bytes; choose a shorter path")
    # gRPC replaces whatever socket lies at the path, a living server's too.
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise ConfigError(
                f"cannot serve gRPC on unix:{path}: another server listens there; stop it or choose another path"
            )
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        raise ConfigError(f"cannot serve gRPC on unix:{path}: the folder must exist and be writable") from None
