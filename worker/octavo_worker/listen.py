"""Binds the worker's address: HOST:PORT or unix:PATH.

It is done before the model is loaded, so that an address in use fails at once. No torch in here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc

from octavo.errors import ConfigError

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a second worker on the same port must fail, not share it
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def make_server() -> grpc.aio.Server:
    """A server with the options that long, idle streams and large plans need."""
    return grpc.aio.server(options=SERVER_OPTIONS)


@contextlib.contextmanager
def bind(server: grpc.aio.Server, listen: str) -> Iterator[str]:
    """Adds the address to the server and gives it back, with the real port where port 0 was asked for.

    A Unix socket that nobody listens on any more is removed before, and ours afterwards. Raises ConfigError when the
    address is wrong or in use.
    """
    if listen.startswith("unix:"):
        path = Path(listen.removeprefix("unix:"))
        _prepare_socket(listen, path)
        _add(server, f"unix:{path}", listen)
        try:
            yield f"unix:{path}"
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        return
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"listen is {listen!r}; it must be HOST:PORT or unix:PATH")
    yield f"{host}:{_add(server, listen, listen)}"


def _add(server: grpc.aio.Server, address: str, listen: str) -> int:
    try:
        with _quiet_core():
            port = server.add_insecure_port(address)
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
