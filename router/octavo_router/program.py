"""The router as a running program: its parts, in the order in which they start and stop.

    bind addresses -> take connections -> find the worker -> serve -> drain -> stop

Before there is a worker, health and metrics are answered and inference is refused as unavailable.

Flags, logging, signals and exit codes are `main.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.authentication import KeyRing, is_loopback, worker_token
from octavo.config import RouterConfig
from octavo.errors import ConfigError, InvalidRequestError
from octavo.tls import link_identity, server_context, server_identity
from octavo_router import chat_templates
from octavo_router.admin import AdminServicer
from octavo_router.backend import Backend
from octavo_router.chat_template import ChatTemplate
from octavo_router.connections import ConnectionLimits
from octavo_router.engine import Engine
from octavo_router.grammar import GrammarCompiler
from octavo_router.grpc_server import GrpcServer
from octavo_router.inference import Inference
from octavo_router.metrics import Metrics
from octavo_router.prompts import PromptReader
from octavo_router.served_model import ServedModel
from octavo_router.template_process import TemplateProcesses
from octavo_router.tokenizer import Tokenizer
from octavo_router.tool_calls import ToolFormat
from octavo_router.worker_client import GrpcWorkerClient, TokenizerFiles, WorkerUnavailableError, wait_for_worker

if TYPE_CHECKING:
    from octavo_router.http_server import HttpServer

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.1
TOKEN_INTERVAL_S = 0.5
# What a server gets to send its last messages once every request has ended.
FLUSH_S = 2.0


class Program:
    """One router. `start`, then `stop`, each once."""

    def __init__(self, config: RouterConfig) -> None:
        """Binds the addresses, so that a port in use is known before anything else happens. Needs a running event loop.

        Raises ConfigError for settings that do not fit together, a template that cannot be read, or an address in use.
        """
        if len(config.worker) != 1:
            raise ConfigError(f"worker names {len(config.worker)} workers; this router serves with exactly one")
        if config.port < 0 and config.grpc_port < 0 and not config.grpc_socket:
            raise ConfigError("port and grpc_port are -1 and grpc_socket is empty; leave one address to serve on")
        self._config = config
        self._template_source = _read_template(config.chat_template)
        self._keys = KeyRing(config.api_key, config.api_key_file)
        self._connections = ConnectionLimits.of(config.max_connections)
        self._tls, self._link = server_identity(config), link_identity(config)
        self._remove_ready_file()
        self._http_socket: socket.socket | None = None
        if config.port >= 0:
            # The HTTP stack is loaded only where HTTP is served.
            from octavo_router.http_server import bind

            self._http_socket = bind(config.host, config.port)
        self._metrics = Metrics()
        self._grpc = GrpcServer(
            host=config.host,
            port=config.grpc_port,
            socket_path=config.grpc_socket,
            max_request_bytes=config.max_request_bytes,
            metrics=self._metrics,
            max_connections=self._connections.grpc,
            keys=self._keys,
            credentials=self._tls.server_credentials() if self._tls is not None else None,
        )
        self._backend = Backend()
        self._worker: GrpcWorkerClient | None = None
        self._prompts: PromptReader | None = None
        self._grammars: GrammarCompiler | None = None
        self._engine: Engine | None = None
        self._http: HttpServer | None = None
        self._health: asyncio.Task[None] | None = None

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP server; empty for none."""
        if self._http_socket is None:
            return ""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{_reachable(self._config.host)}:{self._http_socket.getsockname()[1]}"

    @property
    def grpc_address(self) -> str:
        """HOST:PORT of the gRPC server; empty where it has no TCP port."""
        return f"{_reachable(self._config.host)}:{self._grpc.port}" if self._grpc.port >= 0 else ""

    async def start(self) -> None:
        """Takes connections, finds the worker, however long that takes, and serves. Cancelling it needs a `stop` as
        well.

        Raises ConfigError for a chat template that is no template and ModelLoadError for a tokenizer that is not known.
        """
        await self._grpc.start(self._backend, AdminServicer(self._backend))
        if self._http_socket is not None:
            self._http = self._make_http(self._http_socket)
            await self._http.start()
        self._warn_of_strangers()
        logger.info("taking connections at %s; requests are served once there is a worker", self._addresses())
        self._worker = GrpcWorkerClient(
            self._config.worker[0],
            token=await _worker_token(self._config),
            credentials=self._link.channel_credentials() if self._link is not None else None,
        )
        files = await _tokenizer_files(self._worker)
        tokenizer = Tokenizer.from_defaults(files.tokenizer_json, files.defaults)
        template = self._chat_template(files, tokenizer)
        self._prompts = PromptReader(
            tokenizer,
            template,
            num_threads=self._config.tokenizer_threads,
            request_templates=(
                TemplateProcesses(tokenizer.special_tokens) if self._config.trust_request_chat_template else None
            ),
        )
        self._grammars = GrammarCompiler(files)
        tools = ToolFormat.of(template, tokenizer, self._config.tool_call_parser)
        engine = Engine(self._config, self._worker, tokenizer, self._metrics, default_sampling=files.default_sampling)
        self._engine = engine
        await engine.start()
        inference = Inference(engine, self._prompts, self._metrics, grammars=self._grammars, tools=tools)
        self._backend.open(engine, inference, tokenizer)
        await self._grpc.set_serving(engine.is_ready)
        self._health = asyncio.create_task(self._keep_health(engine), name="health")
        self._announce(engine.model)

    async def drain(self) -> None:
        """Refuses new requests and lets running ones finish within the grace period."""
        await self._grpc.set_serving(False)
        if self._engine is not None:
            await self._engine.drain(self._config.grace_period_s)

    async def stop(self) -> None:
        """Ends what runs: requests fail with UNAVAILABLE, servers send what they have and close."""
        if self._health is not None:
            self._health.cancel()
        await self._grpc.set_serving(False)
        # The engine goes first, so that requests which still run end with an error that the servers can send.
        if self._engine is not None:
            await self._engine.stop()
        elif self._worker is not None:
            await self._worker.close()
        await asyncio.gather(self._grpc.stop(FLUSH_S), *([self._http.stop(FLUSH_S)] if self._http is not None else ()))
        if self._prompts is not None:
            self._prompts.close()
        if self._grammars is not None:
            await self._grammars.close()
        if self._http_socket is not None:
            self._http_socket.close()
        self._remove_ready_file()

    def _make_http(self, bound: socket.socket) -> HttpServer:
        from octavo_router.http_protocol import HttpLimits
        from octavo_router.http_routes import Routes
        from octavo_router.http_security import secure
        from octavo_router.http_server import HttpServer, make_app

        config = self._config
        routes = Routes(
            self._backend,
            metrics=self._metrics,
            max_request_bytes=config.max_request_bytes,
        )
        app = make_app(routes, protect=lambda app: secure(app, config, self._keys, self._metrics))
        limits = HttpLimits(max_connections=self._connections.http)
        return HttpServer(app, bound, tls=server_context(config), limits=limits)

    async def _keep_health(self, engine: Engine) -> None:
        """Tells the health service when the worker is lost, is back, or the engine begins to drain."""
        was_ready: bool | None = None
        while True:
            if engine.is_ready != was_ready:
                was_ready = engine.is_ready
                await self._grpc.set_serving(was_ready)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _chat_template(self, files: TokenizerFiles, tokenizer: Tokenizer) -> ChatTemplate:
        try:
            return ChatTemplate(self._template_source or files.defaults.chat_template, tokenizer.special_tokens)
        except InvalidRequestError as error:
            if self._template_source:
                raise ConfigError(f"chat_template {self._config.chat_template}: {error.message}") from None
            logger.error("the model's chat template is not used: %s; give another with --chat-template", error.message)
            return ChatTemplate("", tokenizer.special_tokens)

    def _announce(self, model: ServedModel) -> None:
        """Says where it serves, to people in the log and to a parent process in the ready file."""
        config = self._config
        if config.ready_file:
            addresses = {"http": self.http_url, "grpc": self.grpc_address, "grpc_socket": config.grpc_socket}
            _write_atomically(Path(config.ready_file), json.dumps(addresses | {"pid": os.getpid()}))
        logger.info("ready: %s at %s", ", ".join(model.names), self._addresses())

    def _addresses(self) -> str:
        """Where it is reached, for the log."""
        unix = f"unix:{self._config.grpc_socket}" if self._config.grpc_socket else ""
        grpc = ", ".join(filter(None, (self.grpc_address, unix))) or "none"
        return f"HTTP {f'{self.http_url}/v1' if self.http_url else 'none'}, gRPC {grpc}"

    def _warn_of_strangers(self) -> None:
        config = self._config
        if (
            not (self._keys or config.ssl_cert_reqs or is_loopback(config.host))
            and max(config.port, config.grpc_port) >= 0
        ):
            logger.warning(
                "everybody who reaches %s is served: set OCTAVO_API_KEY, --api-key-file or --ssl-cert-reqs 2",
                config.host,
            )

    def _remove_ready_file(self) -> None:
        if self._config.ready_file:
            Path(self._config.ready_file).unlink(missing_ok=True)


async def _worker_token(config: RouterConfig) -> str:
    """The token to send to the worker, which makes the file with it if there is none."""
    told = False
    while not _has_token(config):
        if not told:
            told = True
            logger.warning("waiting for worker_token_file %s, which the worker makes", config.worker_token_file)
        await asyncio.sleep(TOKEN_INTERVAL_S)
    return worker_token(config)


def _has_token(config: RouterConfig) -> bool:
    try:
        return not config.worker_token_file or Path(config.worker_token_file).exists()
    except OSError:
        return True  # whoever reads it says why not


async def _tokenizer_files(worker: GrpcWorkerClient) -> TokenizerFiles:
    """The worker's tokenizer, once there is a worker."""
    while True:
        await wait_for_worker(worker)
        try:
            return await worker.get_tokenizer()
        except WorkerUnavailableError as error:
            logger.warning("the worker at %s did not send its tokenizer: %s; trying again", worker.address, error)


def _read_template(path: str) -> str:
    """The template in a file, or one that comes along."""
    if not path:
        return ""
    if path in chat_templates.NAMES:
        return chat_templates.read(path)
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is {path!r}, which cannot be read: {error}") from None
    if not source:
        raise ConfigError(f"chat_template is {path!r}, which is empty; give a Jinja template")
    return source


def _reachable(host: str) -> str:
    """A host under which this machine reaches itself, in the notation of URLs."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _write_atomically(path: Path, text: str) -> None:
    """Writes a file that readers see whole or not at all. Raises ConfigError where it cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"ready_file {path} cannot be written: {error.strerror}") from None
