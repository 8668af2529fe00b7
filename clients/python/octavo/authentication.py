"""Who may call: keys that are compared in constant time, the file they may lie in, and a gRPC interceptor that asks.

Both servers use it: the router for its clients' API keys, the worker for its router's token. What HTTP answers to a
caller without a key is the router's own. Keys are kept as SHA-256 digests, and no message, log line or repr shows one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from octavo.config import RouterConfig, WorkerConfig
from octavo.errors import ERROR_DOMAIN, AuthenticationError, ConfigError, mapping_of
from octavo.settings import check_secret

_log = logging.getLogger(__name__)

METADATA_KEY: Final = "authorization"
HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"
_SCHEME: Final = "bearer"
_RELOAD_INTERVAL_S: Final = 1.0
_COMMENT = re.compile(r"(?:^|\s)#")
_Signature = tuple[int, int, int, int]


def bearer(secret: str) -> str:
    """The value of an Authorization header that carries a secret."""
    return f"Bearer {secret}"


def is_loopback(host: str) -> bool:
    """Whether an address to listen on, a name or a number in brackets or not, is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class KeyRing:
    """The keys that are good: given ones, and those in a file.

    The file has one key a line; empty lines and comments, from a # at the beginning of a line or behind a blank on,
    are left out. It is looked at once a second at most,
    when somebody calls, and read again when it has changed: its keys at that moment are good, others are not any more.
    A file that has become unreadable leaves the keys as they were, with an error in the log.
    """

    def __init__(
        self, keys: Iterable[str] = (), path: str = "", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError for a file that cannot be read or holds no key, or something that can be none."""
        self._given = tuple(map(_digest, keys))
        self._path = Path(path) if path else None
        self._clock = clock
        self._in_file: tuple[bytes, ...] = ()
        self._signature: _Signature | None = None
        self._looked_at = clock()
        if self._path is not None:
            self._signature = _signature(self._path)  # before it is read: a change from now on is seen
            self._in_file = tuple(map(_digest, read_keys(self._path)))
            if not self._in_file:
                raise ConfigError(f"api_key_file {path} holds no key; put at least one in, one a line")

    def __bool__(self) -> bool:
        """Whether callers need a key."""
        return bool(self._given) or self._path is not None

    def accepts(self, authorization: str) -> bool:
        """Whether an Authorization header carries a good key. Takes equally long whichever key it is, if any."""
        scheme, _, key = authorization.strip().partition(" ")
        digest = _digest(key.strip())
        found = False
        for good in (*self._given, *self._keys_in_file()):
            found |= hmac.compare_digest(good, digest)
        return found and scheme.lower() == _SCHEME

    def _keys_in_file(self) -> tuple[bytes, ...]:
        now = self._clock()
        if self._path is None or now - self._looked_at < _RELOAD_INTERVAL_S:
            return self._in_file
        self._looked_at = now
        signature = _signature(self._path)
        if signature == self._signature:
            return self._in_file
        self._signature = signature
        try:
            self._in_file = tuple(map(_digest, read_keys(self._path)))
        except ConfigError as error:
            _log.error("%s; the keys it held before stay good", error.message)
        else:
            _log.info("api_key_file has changed; it holds %d keys now", len(self._in_file))
        return self._in_file


def read_keys(path: Path) -> list[str]:
    """The keys in a file. Raises ConfigError, naming the line and not its content, for what can be no key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"api_key_file {path} cannot be read: {reason}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        if key := _COMMENT.split(line, maxsplit=1)[0].strip():
            check_secret(f"line {number} of api_key_file {path}", key)
            keys.append(key)
    return keys


def worker_token(config: WorkerConfig | RouterConfig, *, make: bool = False) -> str:
    """The token of the connection between router and worker; empty for none.

    make: a token file that does not exist is made, readable by its owner alone. Several may try at once: all get the
    token of the first. Raises ConfigError for a file that cannot be read or made.
    """
    if not config.worker_token_file:
        return config.worker_token
    path = Path(config.worker_token_file)
    try:
        if make and not path.exists():
            _make_token_file(path)
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        verb = "made or read" if make else "read"
        raise ConfigError(f"worker_token_file {path} cannot be {verb}: {reason}") from None
    check_secret(f"the token in worker_token_file {path}", token)
    return token


def _make_token_file(path: Path) -> None:
    """Makes the file whole or not at all, and leaves one alone that is there by now."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # readable by its owner alone
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a good key with UNAUTHENTICATED, whatever their method, before anything of them is read.

    Methods whose path begins with one of `open_prefixes` need no key.
    """

    def __init__(
        self,
        keys: KeyRing,
        *,
        refusal: str,
        open_prefixes: Collection[str] = (HEALTH_PREFIX,),
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """refusal: what a caller is told who has no good key. on_refused: called for each."""
        self._keys = keys
        self._open = tuple(open_prefixes)
        self._on_refused = on_refused
        status = rpc_status.to_status(_status(AuthenticationError(refusal)))

        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
            await context.abort(status.code, status.details, status.trailing_metadata)
            raise AssertionError("abort returned")

        # A handler for a stream on either side fits every call: it ends the call before any message is read.
        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method: str = handler_call_details.method
        if method.startswith(self._open) or self._keys.accepts(_authorization(handler_call_details)):
            return await continuation(handler_call_details)
        self._on_refused()
        return self._refuse


def _authorization(details: grpc.HandlerCallDetails) -> str:
    for key, value in details.invocation_metadata or ():
        if key == METADATA_KEY and isinstance(value, str):
            return value
    return ""


def _status(error: AuthenticationError) -> status_pb2.Status:
    mapping = mapping_of(error)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=mapping.reason, domain=ERROR_DOMAIN))
    return status_pb2.Status(code=mapping.grpc_code.value[0], message=error.message, details=[detail])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _signature(path: Path) -> _Signature | None:
    """What tells one content of a file from another, and whether it may be read; None where there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
