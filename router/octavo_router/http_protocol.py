"""uvicorn's HTTP/1.1 connection with limits: how large a head may be, how slow a request, how many connections.

uvicorn's parser takes heads without end and waits for ever for the rest of a request, so that a few clients who send
nothing, or a byte a minute, would use up the memory or the connections. What a request means is the application's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo_router.http_errors import status_body

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_LINGER_S = 0.5
_LOG_INTERVAL_S = 10.0


@dataclass(frozen=True)
class HttpLimits:
    """max_head_bytes: of the request line and all headers, trailers too. max_headers: their number. head_timeout_s:
    for the first request of a connection to begin, and for a request to arrive; a body gets a second more for each
    min_bytes_per_s it brings. max_connections: at a time; 0 is no limit.
    """

    max_head_bytes: int = 64 << 10
    max_headers: int = 256
    head_timeout_s: float = 30.0
    min_bytes_per_s: int = 4 << 10
    max_connections: int = 0


def limited_protocol(limits: HttpLimits) -> type[asyncio.Protocol]:
    """The class of connections with these limits, for uvicorn's `http`."""
    return type("LimitedHttpProtocol", (_LimitedHttpProtocol,), {"limits": limits})


class _LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. The application sees of it only whole heads within the limits."""

    limits: ClassVar[HttpLimits]
    _last_logged: ClassVar[float] = -_LOG_INTERVAL_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._receiving = True  # the first request is waited for as the rest of one is
        self._began_at = self.loop.time()
        self._num_received = 0
        self._head_bytes = self._num_headers = 0
        self._raw_bytes = 0  # since the parser last told of something, which it may hold; a chunk less at most
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if 0 < self.limits.max_connections < len(self.connections):
            self._log_full()
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "the server has as many connections as it takes; try later")
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiving = False
        self._set_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._raw_bytes += len(data)
        super().data_received(data)
        self._num_received += len(data)
        if self._raw_bytes > self.limits.max_head_bytes:
            self._refuse_head()
        self._set_timer()

    def on_message_begin(self) -> None:
        self._receiving = True
        self._began_at, self._num_received = self.loop.time(), 0
        self._head_bytes = self._num_headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._fits(len(url), headers=0):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._raw_bytes = 0
        if self._fits(len(name) + len(value), headers=1):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._raw_bytes = 0
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._raw_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._raw_bytes = 0
        self._receiving = False
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls where it cannot go on with what came."""
        self._refuse(HTTPStatus.BAD_REQUEST, "what came is not HTTP/1.1, or is not well-formed")

    def _fits(self, num_bytes: int, *, headers: int) -> bool:
        """Counts a part of the head. Refuses the request once it is over a limit."""
        self._head_bytes += num_bytes
        self._num_headers += headers
        if self._head_bytes > self.limits.max_head_bytes or self._num_headers > self.limits.max_headers:
            self._refuse_head()
        return not self._refused

    def _set_timer(self) -> None:
        """Keeps a timer while a request is under way to us, and none for one that has come whole."""
        if self._receiving and not self._refused:
            if self._timer is None:
                self._timer = self.loop.call_later(_CHECK_INTERVAL_S, self._check_pace)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_pace(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # it is we who wait with reading
            self._began_at, self._num_received = self.loop.time(), 0
        allowed_s = self.limits.head_timeout_s + self._num_received / self.limits.min_bytes_per_s
        if self.loop.time() - self._began_at > allowed_s:
            if not self._num_received:  # a connection on which nothing was asked
                self.transport.close()
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time")
        self._set_timer()

    def _refuse_head(self) -> None:
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request line and headers are over {self.limits.max_head_bytes} bytes or {self.limits.max_headers} "
            "headers; send less",
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answers for the request that is coming in, unless an answer is under way, and closes a little later: a client
        that still sends would see a reset connection instead of the answer.
        """
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started):
            body = status_body(status, message)
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.loop.call_later(_LINGER_S, self.transport.close)

    @classmethod
    def _log_full(cls) -> None:
        now = time.monotonic()
        if now - _LimitedHttpProtocol._last_logged >= _LOG_INTERVAL_S:
            _LimitedHttpProtocol._last_logged = now
            logger.warning("there are %d connections; more are refused (--max-connections)", cls.limits.max_connections)
