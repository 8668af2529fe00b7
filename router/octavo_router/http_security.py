"""Who may use the HTTP front end: API keys, and web pages of other origins (CORS).

Both are ASGI middleware around the application. How keys are compared is `octavo.authentication`'s; TLS, sizes and
paces are the server's (`http_server.py`, `http_protocol.py`).
"""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.authentication import KeyRing
from octavo.config import RouterConfig
from octavo.errors import AuthenticationError
from octavo_router.http_errors import error_response
from octavo_router.metrics import Metrics

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/version"})
"""What is told to everybody: no prompt, no answer and no setting is in it, and probes and scrapers carry no keys."""

MISSING_KEY: Final = "no API key was sent; send one as `Authorization: Bearer KEY`"
WRONG_KEY: Final = "the API key is not known here; ask the server's operator for one"
_CHALLENGE: Final = "Bearer"
_PREFLIGHT_S: Final = 600


class ApiKeyGuard:
    """Lets requests pass that carry a good key or ask for an open path. Others get 401 before their body is read."""

    def __init__(self, app: ASGIApp, keys: KeyRing, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        authorization = Headers(scope=scope).get("authorization", "")
        if self._keys.accepts(authorization):
            await self._app(scope, receive, send)
            return
        self._metrics.unauthenticated()
        response = error_response(AuthenticationError(WRONG_KEY if authorization else MISSING_KEY))
        response.headers["www-authenticate"] = _CHALLENGE
        await response(scope, receive, send)


def secure(app: Starlette, config: RouterConfig, keys: KeyRing, metrics: Metrics) -> None:
    """Adds what the settings ask for. A browser asks without a key whether it may call at all, so that comes first."""
    if keys:
        app.add_middleware(ApiKeyGuard, keys=keys, metrics=metrics)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
            max_age=_PREFLIGHT_S,
        )
