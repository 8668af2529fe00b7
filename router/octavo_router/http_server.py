"""The HTTP front end: the application and the server that runs it.

The paths are `openapi.py`'s, their handlers `http_routes.py`'s. uvicorn runs in the caller's event loop and leaves
signals alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import uuid
from collections.abc import Callable, Iterator
from http import HTTPStatus

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import ConfigError, OctavoError
from octavo_router import openapi
from octavo_router.http_errors import error_response, internal_error, status_response
from octavo_router.http_exchange import ClientGoneError
from octavo_router.http_protocol import HttpLimits, limited_protocol
from octavo_router.http_routes import Routes

# Above what pools of clients and load balancers keep connections for, so that they close first.
KEEP_ALIVE_S = 120
_BACKLOG = 4096
_MAX_REQUEST_ID_LENGTH = 128


def make_app(routes: Routes, *, protect: Callable[[Starlette], None] = lambda app: None) -> ASGIApp:
    """The application over its handlers: every operation of `openapi.py`, errors in OpenAI's shape.

    protect: adds what stands between a request and the handlers.
    """
    app = Starlette(
        routes=[
            Route(operation.path, getattr(routes, operation.name), methods=[operation.method])
            for operation in openapi.OPERATIONS
        ],
        exception_handlers={
            OctavoError: _on_octavo_error,
            HTTPException: _on_http_exception,
            ClientGoneError: _on_client_gone,
        },
    )
    app.router.redirect_slashes = False
    protect(app)
    app.add_middleware(_Outermost)
    return app


async def _on_octavo_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OctavoError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {status.phrase.lower()}"
    if status is HTTPStatus.METHOD_NOT_ALLOWED and error.headers and "Allow" in error.headers:
        message += f"; allowed: {error.headers['Allow']}"
    return status_response(status, message, dict(error.headers or {}))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    # Nobody reads it; 499 is what proxies log for this.
    return Response(status_code=499)


class _Outermost:
    """Names each request and says its name in X-Request-Id; answers 500 where a handler failed unexpectedly."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_request_id(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            response = error_response(internal_error(error))
            if not begun:
                await response(scope, receive, send_named)


def _given_request_id(scope: Scope) -> str:
    """The client's X-Request-Id, or nothing where it is none that can be logged and echoed."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= _MAX_REQUEST_ID_LENGTH:
            text: str = value.decode("latin-1")
            return text if text.isascii() and text.isprintable() else ""
    return ""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket for HTTP. Port 0 picks a free one. Raises ConfigError for an address that cannot be bound.

    It listens at once, since only that keeps others from the port; connections wait until the server starts.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"cannot serve HTTP on {host}: {error.strerror}; choose another address with --host"
        ) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot serve HTTP on {host}:{port}: {error.strerror}; choose another port with --port (0 picks a free "
            "one) or stop what listens there"
        ) from None
    sock.setblocking(False)
    return sock


class HttpServer:
    """uvicorn on a bound socket, inside the running event loop. tls: for HTTPS; None for plain HTTP."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
        limits: HttpLimits = HttpLimits(),  # noqa: B008 - immutable
    ) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            http=limited_protocol(limits),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        config.load()
        config.ssl = tls
        self._server = _QuietServer(config)
        self._sock = sock
        self._serving: asyncio.Task[None]

    async def start(self) -> None:
        """Begins to serve."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended before it had started")
            await asyncio.sleep(0.005)

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, gives responses under way grace_s to end, and closes the rest."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._serving


class _QuietServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: the program has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
