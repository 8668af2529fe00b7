"""A real pair of programs for the tests that clients in other languages bring along, and the way to disturb it.

Such a test learns by environment variables where the server is, and asks for its router to be killed over HTTP: it
cannot send signals to a process that it does not know.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.certificates import make_certificates
from tests.e2e.harness import Server, running

API_KEY = "key-of-the-tests"


@dataclass(frozen=True)
class LiveServer:
    """A server with an API key, and one with TLS beside it. `environment` tells a client's tests of both."""

    plain: Server
    environment: dict[str, str]


@contextmanager
def live_server(model: Path, folder: Path) -> Iterator[LiveServer]:
    """Both servers of a tiny model for the length of a with block; certificates are made in the folder."""
    settings = {"model": str(model), "max_model_len": 512, "api_key": (API_KEY,)}
    certificates = make_certificates(folder)
    tls = {"ssl_keyfile": str(certificates.server_key), "ssl_certfile": str(certificates.server_chain)}
    with running(**settings) as plain, running(**settings, **tls) as secure, _kill_switch(plain) as url:
        yield LiveServer(
            plain,
            {
                "OCTAVO_TEST_ADDRESS": plain.grpc_address,
                "OCTAVO_TEST_API_KEY": API_KEY,
                "OCTAVO_TEST_KILL_URL": url,
                "OCTAVO_TEST_TLS_ADDRESS": secure.grpc_address,
                "OCTAVO_TEST_TLS_ROOTS": str(certificates.authority),
            },
        )


@contextmanager
def _kill_switch(server: Server) -> Iterator[str]:
    """A URL at which a POST kills the server's router with SIGKILL, once it runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            pid = server.pair.pids().get("router")
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            self.send_response(204 if pid is not None else 409)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    switch = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=switch.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{switch.server_port}/"
    finally:
        switch.shutdown()
        switch.server_close()
        thread.join()
