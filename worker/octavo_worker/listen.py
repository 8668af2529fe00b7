"""Binds the worker's address, HOST:PORT or unix:PATH, and decides who may call there.

It is done before the model is loaded, so that an address in use fails at once. A worker serves its router alone, which
proves itself by the shared token, by a certificate, or by both; only health is told to everybody. No torch in here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

from octavo.authentication import AuthenticationInterceptor, KeyRing, is_loopback, worker_token
from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo.tls import link_identity

_log = logging.getLogger(__name__)

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a second worker on the same port must fail, not share it
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 20_000),
)
_REFUSAL = "a worker serves its router alone, which sends the worker's token; clients call the router instead"


@dataclass(frozen=True)
class Access:
    """Who may call: callers with the token, if there is one, over TLS with a certificate, if there are credentials."""

    token: str = field(default="", repr=False)
    credentials: grpc.ServerCredentials | None = None

    @classmethod
    def of(cls, config: WorkerConfig) -> Self:
        """Makes the token's file where there is none. Raises ConfigError for files that cannot be used.

        Logs a warning where strangers on the network could call.
        """
        identity = link_identity(config)
        access = cls(worker_token(config, make=True), identity.server_credentials() if identity is not None else None)
        host = "localhost" if config.listen.startswith("unix:") else config.listen.rpartition(":")[0]
        if not access.token and identity is None and not is_loopback(host):
            _log.warning(
                "everybody who reaches %s can use this worker: set OCTAVO_WORKER_TOKEN or --worker-token-file here and "
                "at its router, or give both certificates (--worker-ssl-certfile)",
                config.listen,
            )
        return access


def make_server(access: Access | None = None) -> grpc.aio.Server:
    """A server with the options that long, idle streams and large plans need. Without `access` it serves everybody."""
    token = access.token if access is not None else ""
    interceptors = [AuthenticationInterceptor(KeyRing([token]), refusal=_REFUSAL)] if token else []
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)


@contextlib.contextmanager
def bind(server: grpc.aio.Server, listen: str, access: Access | None = None) -> Iterator[str]:
    """Adds the address to the server and gives it back, with the real port where port 0 was asked for.

    A Unix socket that nobody listens on any more is removed before, and ours afterwards. Raises ConfigError when the
    address is wrong or in use.
    """
    if listen.startswith("unix:"):
        path = Path(listen.removeprefix("unix:"))
        _prepare_socket(listen, path)
        _add(server, f"unix:{path}", listen, access)
        try:
            yield f"unix:{path}"
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"listen is {listen!r}; it must be HOST:PORT or unix:PATH")
    yield f"{host}:{_add(server, listen, listen, access)}"


def _add(server: grpc.aio.Server, address: str, listen: str, access: Access | None) -> int:
    credentials = access.credentials if access is not None else None
    try:
        with _quiet_core():
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigError(f"cannot listen on {listen}: the address is in use or is not this machine's")
    return port


def _prepare_socket(listen: str, path: Path) -> None:
    """Removes a socket that a dead process left behind."""
    if not str(path) or not path.parent.is_dir():
        raise ConfigError(f"listen is {listen!r}, and the folder {path.parent} does not exist")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"listen is {listen!r}, and {path} is a file that is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"listen is {listen!r}, and {path} cannot be used: {error.strerror}") from None
    raise ConfigError(f"cannot listen on {listen}: another process listens there")


@contextlib.contextmanager
def _quiet_core() -> Iterator[None]:
    """Keeps gRPC's core from writing its own lines about a failed bind to stderr, where we write one."""
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
