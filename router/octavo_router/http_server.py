"""The HTTP front end: OpenAI's API, vLLM's tokenizing routes, health and metrics.

Routes read a body (`openai_schema.py`), make requests of the contract from it (`openai_requests.py`) and let an
exchange (`http_exchange.py`) answer. uvicorn runs in the caller's event loop and leaves signals alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import fastapi
import uvicorn
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import ConfigError, InvalidRequestError, ModelNotFoundError, OctavoError
from octavo.v1 import inference_pb2 as pb
from octavo_router import __version__, openai_requests
from octavo_router.http_errors import error_response, internal_error, status_response
from octavo_router.http_exchange import BodyTooLargeError, ClientGoneError, Exchange, GenerationResponse, read_body
from octavo_router.inference import Inference
from octavo_router.metrics import CONTENT_TYPE, Metrics
from octavo_router.openai_answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from octavo_router.openai_schema import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body

BodyT = TypeVar("BodyT", CompletionBody, ChatCompletionBody, TokenizeBody, DetokenizeBody)
RequestT = TypeVar("RequestT")

# Above what pools of clients and load balancers keep connections for, so that they close first.
KEEP_ALIVE_S = 120
_BACKLOG = 4096
_MAX_REQUEST_ID_LENGTH = 128
# Above this, reading a body takes longer than the event loop should wait: lists of token ids, 0.3 us each.
_SMALL_BODY_BYTES = 64 << 10
_SCHEMA_PATH = "#/components/schemas/{model}"


class Routes:
    """The handlers of the application."""

    def __init__(
        self,
        inference: Inference,
        *,
        token_bytes: Callable[[int], bytes],
        is_serving: Callable[[], bool],
        metrics: Metrics,
        max_request_bytes: int,
    ) -> None:
        self._inference = inference
        self._token_bytes = token_bytes
        self._is_serving = is_serving
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes

    async def completions(self, request: Request) -> Response:
        """Completes prompts."""
        body, requests = await self._read(
            request,
            CompletionBody,
            lambda body: openai_requests.completion_requests(body, _request_id(request, body.request_id)),
        )
        lengths = await self._prompt_lengths(requests) if body.logprobs is not None else ()
        options = self._options(body, f"cmpl-{_request_id(request, body.request_id)}", lengths)
        return self._generation(requests, CompletionAnswer(options, body.n or 1), bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        body, chat_request = await self._read(
            request,
            ChatCompletionBody,
            lambda body: openai_requests.chat_request(body, _request_id(request, body.request_id)),
        )
        options = self._options(body, f"chatcmpl-{_request_id(request, body.request_id)}", ())
        return self._generation([chat_request], ChatAnswer(options, body.n or 1), bool(body.stream))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        _, tokenize_request = await self._read(request, TokenizeBody, openai_requests.tokenize_request)
        response = await self._inference.tokenize(tokenize_request)
        token_ids = list(response.token_ids)
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": response.max_model_len,
                "tokens": token_ids,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        _, detokenize_request = await self._read(request, DetokenizeBody, openai_requests.detokenize_request)
        try:
            response = await self._inference.detokenize(detokenize_request)
        except InvalidRequestError as error:
            error.field = "tokens"
            raise
        return JSONResponse({"prompt": response.text})

    async def models(self, request: Request) -> Response:
        """Lists what `model` may be."""
        models = self._inference.list_models().models
        return JSONResponse({"object": "list", "data": [_model_json(model, models[0].name) for model in models]})

    async def model(self, request: Request) -> Response:
        """Tells about one model."""
        name = request.path_params["model"]
        models = self._inference.list_models().models
        for model in models:
            if model.name == name:
                return JSONResponse(_model_json(model, models[0].name))
        raise ModelNotFoundError(
            f"model {name[:200]!r} is not served here; served: {', '.join(m.name for m in models)}"
        )

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, 503 while the server drains or has no worker."""
        serving = self._is_serving()
        status = HTTPStatus.OK if serving else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": "serving" if serving else "not serving"}, status)

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges in Prometheus' text format."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        """The router's version."""
        return JSONResponse({"version": __version__})

    async def _read(
        self, request: Request, kind: type[BodyT], convert: Callable[[BodyT], RequestT]
    ) -> tuple[BodyT, RequestT]:
        """The request's body, and what convert makes of it; large ones in a thread."""
        data = await read_body(request, self._max_request_bytes)

        def work() -> tuple[BodyT, RequestT]:
            body = parse_body(kind, data)
            return body, convert(body)

        return work() if len(data) <= _SMALL_BODY_BYTES else await asyncio.to_thread(work)

    def _options(
        self, body: CompletionBody | ChatCompletionBody, answer_id: str, prompt_lengths: list[int] | tuple[()]
    ) -> AnswerOptions:
        return AnswerOptions(
            id=answer_id,
            model=body.model or self._inference.model_name,
            digest=self._inference.model_digest,
            logprobs=body.logprobs is not None and body.logprobs is not False,
            token_bytes=self._token_bytes,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            prompt_lengths=prompt_lengths,
        )

    def _generation(self, requests: list[pb.GenerateRequest], answer: Answer, stream: bool) -> Response:
        return GenerationResponse(self._inference, Exchange(requests, answer, stream))

    async def _prompt_lengths(self, requests: list[pb.GenerateRequest]) -> list[int]:
        """Length of each prompt in characters."""
        lengths = []
        for request in requests:
            if request.WhichOneof("prompt") == "text":
                lengths.append(len(request.text))
            else:
                decoded = await self._inference.detokenize(pb.DetokenizeRequest(token_ids=request.token_ids.ids))
                lengths.append(len(decoded.text))
        return lengths


def make_app(routes: Routes) -> ASGIApp:
    """The application over its handlers: routes, their schemas at /openapi.json, errors in OpenAI's shape."""
    app = fastapi.FastAPI(title="Octavo", version=__version__, redirect_slashes=False)
    bodies: list[type[BaseModel]] = []

    def post(path: str, handler: Any, body: type[BaseModel]) -> None:
        bodies.append(body)
        content = {"application/json": {"schema": {"$ref": _SCHEMA_PATH.format(model=body.__name__)}}}
        extra = {"requestBody": {"required": True, "content": content}}
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=extra, response_class=Response)

    def get(path: str, handler: Any) -> None:
        app.add_api_route(path, handler, methods=["GET"], response_class=Response)

    post("/v1/completions", routes.completions, CompletionBody)
    post("/v1/chat/completions", routes.chat_completions, ChatCompletionBody)
    post("/tokenize", routes.tokenize, TokenizeBody)
    post("/detokenize", routes.detokenize, DetokenizeBody)
    get("/v1/models", routes.models)
    get("/v1/models/{model:path}", routes.model)
    get("/health", routes.health)
    app.add_api_route("/health", routes.health, methods=["HEAD"], include_in_schema=False, response_class=Response)
    get("/metrics", routes.metrics)
    get("/version", routes.version)

    make_document = app.openapi

    def openapi() -> dict[str, Any]:
        document = make_document()
        document.setdefault("components", {}).setdefault("schemas", {}).update(_schemas(bodies))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_exception_handler(OctavoError, _on_octavo_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(BodyTooLargeError, _on_body_too_large)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_middleware(_Outermost)
    return app


def _schemas(bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """The bodies' JSON schemas and those that they refer to, by name."""
    schemas: dict[str, Any] = {}
    for body in bodies:
        schema = body.model_json_schema(ref_template=_SCHEMA_PATH)
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
    return schemas


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


async def _on_body_too_large(request: Request, error: Exception) -> Response:
    assert isinstance(error, BodyTooLargeError)
    return error.response


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


def _request_id(request: Request, in_body: str | None) -> str:
    return in_body or str(request.state.request_id)


def _model_json(model: pb.Model, root: str) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "octavo",
        "root": root,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


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
    """uvicorn on a bound socket, inside the running event loop."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
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
