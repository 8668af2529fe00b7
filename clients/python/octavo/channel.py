"""Where a server is and how the connection to it is kept: addresses, keys, TLS and channel options of every client.

Opens no lasting connection; the clients make their channels of what this module returns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict, overload

import grpc
from grpc_health.v1 import health_pb2

from octavo.authentication import METADATA_KEY, bearer
from octavo.errors import ConfigError
from octavo.settings import check_secret, environment_name
from octavo.tls import StrPath, TlsIdentity, load_authorities

DEFAULT_ADDRESS = "127.0.0.1:50051"
API_KEY_VARIABLE = environment_name("api_key")

_TCP = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|\[::1\]")


class AccessOptions(TypedDict, total=False):
    """How a client proves who it is, and how it knows its server.

    api_key: sent with every call; unset, the first key in OCTAVO_API_KEY is. Without `tls` it can be read on the way.
    tls: whether to encrypt and to check the server's certificate; implied by any of the files. root_certificates: PEM
    file of the authorities to trust; unset, those that gRPC brings. client_certificate, client_key: PEM files, for
    servers that ask for a certificate.
    """

    api_key: str | None
    tls: bool | None
    root_certificates: StrPath | None
    client_certificate: StrPath | None
    client_key: StrPath | None


@dataclass(frozen=True)
class Access:
    """What `AccessOptions` come to: metadata of every call, and the credentials of a channel (None for plain text)."""

    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)

    @classmethod
    def of(cls, options: AccessOptions, environ: Mapping[str, str] = os.environ) -> Self:
        """Raises ConfigError for a key that can be none, a file that cannot be used, or files without their other
        half.
        """
        key, source = options.get("api_key"), "api_key"
        if key is None:
            key, source = next(filter(None, environ.get(API_KEY_VARIABLE, "").split(",")), ""), API_KEY_VARIABLE
        if key:
            check_secret(source, key)
        return cls(((METADATA_KEY, bearer(key)),) if key else (), _credentials(options))

    def channel(self, address: str) -> grpc.Channel:
        """A channel to the address."""
        options = channel_options(address)
        if self.credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self.credentials, options=options)

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        """A channel to the address, for the event loop that runs."""
        options = channel_options(address)
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self.credentials, options=options)


def _credentials(options: AccessOptions) -> grpc.ChannelCredentials | None:
    roots, chain, key = options.get("root_certificates"), options.get("client_certificate"), options.get("client_key")
    if (chain is None) != (key is None):
        given, missing = ("client_certificate", "client_key") if key is None else ("client_key", "client_certificate")
        raise ConfigError(f"{given} is given without {missing}; give both")
    tls = options.get("tls")
    if tls is False and (roots or chain):
        raise ConfigError("tls is False, but certificates are given; leave one of them out")
    if not (tls or roots or chain):
        return None
    if chain is None or key is None:
        return grpc.ssl_channel_credentials(load_authorities("root_certificates", roots) if roots else None)
    return TlsIdentity.load(
        ("client_key", key), ("client_certificate", chain), ("root_certificates", roots or "")
    ).channel_credentials()


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
