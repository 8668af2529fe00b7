"""Where a server is and how the connection to it is kept: addresses and channel options of every client.

Opens no lasting connection; the clients make their channels of what this module returns.
"""

from __future__ import annotations

import re
from typing import Any, overload

import grpc
from grpc_health.v1 import health_pb2

from octavo.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:50051"

_TCP = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|\[::1\]")


def check_address(address: str) -> str:
    """The address as it was given. Raises ConfigError unless it is HOST:PORT or unix:PATH."""
    if address.startswith("unix:") and len(address) > len("unix:"):
        return address
    match = _TCP.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ConfigError(
            f"address is {address!r}; it must be the server's gRPC address, HOST:PORT or unix:PATH, "
            f"such as {DEFAULT_ADDRESS}"
        )
    return address


def channel_options(address: str) -> list[tuple[str, Any]]:
    """Options of a channel: keepalive so that an idle or long stream lives, and no size limit but the server's.

    A proxy from the environment is not used for addresses of this machine.
    """
    options: list[tuple[str, Any]] = [
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    match = _TCP.fullmatch(address)
    if match is None or _LOOPBACK.fullmatch(match["host"]):
        options.append(("grpc.enable_http_proxy", 0))
    return options


@overload
def health_method(
    channel: grpc.Channel,
) -> grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]: ...
@overload
def health_method(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]: ...
def health_method(channel: Any) -> Any:
    """The method Check of grpc.health.v1 on either kind of channel."""
    return channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )


def says_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Whether a server that answered so takes requests."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def is_serving(address: str, *, timeout_s: float) -> bool:
    """Whether a server answers at the address and says that it serves (grpc.health.v1)."""
    with grpc.insecure_channel(address, options=channel_options(address)) as channel:
        try:
            return says_serving(health_method(channel)(health_pb2.HealthCheckRequest(), timeout=timeout_s))
        except grpc.RpcError:
            return False
