"""Limits of HTTP connections, over real sockets and an application that echoes bodies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo_router import http_protocol
from octavo_router.http_protocol import HttpLimits
from octavo_router.http_server import HttpServer, bind

LIMITS = HttpLimits(max_head_bytes=1000, max_headers=10)
HASTY = dataclasses.replace(LIMITS, head_timeout_s=0.1, min_bytes_per_s=1 << 30)
GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(http_protocol, "_LINGER_S", 0.2)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Response(body or b"empty")(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(limits: HttpLimits = LIMITS) -> AsyncIterator[int]:
    """A server's port."""
    sock = bind("127.0.0.1", 0)
    server = HttpServer(echo, sock, limits=limits)
    await server.start()
    yield sock.getsockname()[1]
    await server.stop(1)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()


async def answer(connection: Connection) -> tuple[int, bytes]:
    """Status and body of the next response."""
    reader, _ = connection
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
    return int(head.split()[1]), await reader.readexactly(int(headers["content-length"]))


async def ask(port: int, *pieces: bytes) -> tuple[int, bytes]:
    """The answer to a request, and then the end of the connection if it is refused."""
    async with connected(port) as connection:
        for piece in pieces:
            connection[1].write(piece)
            await connection[1].drain()
        status, body = await answer(connection)
        if status != 200:
            assert await asyncio.wait_for(connection[0].read(), 10) == b""
            assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
        return status, body


async def test_requests_within_the_limits() -> None:
    async with serving() as port, connected(port) as connection:
        for _ in range(3):  # heads do not add up
            connection[1].write(POST[:-2] + b"a: " + b"x" * 800 + b"\r\n\r\n0123456789")
            assert await answer(connection) == (200, b"0123456789")


@pytest.mark.parametrize(
    "pieces",
    [
        (GET, b"a: " + b"x" * 1000 + b"\r\n\r\n"),
        (b"GET /" + b"x" * 1000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",),
        (GET, *[b"a: b\r\n" for _ in range(11)], b"\r\n"),
        (GET, b"a: ", *[b"x" * 100_000 for _ in range(6)]),  # a header that never ends
        (b"GET /", *[b"x" * 100 for _ in range(11)]),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: " + b"x" * 1100 + b"\r\n\r\n"),
    ],
)
async def test_heads_that_are_too_large(pieces: tuple[bytes, ...]) -> None:
    async with serving() as port:
        status, body = await ask(port, *pieces)
        assert status == 431
        assert b"over 1000 bytes or 10 headers" in body
        assert (await ask(port, GET + b"\r\n"))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",  # a client that wants TLS
        GET + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
        GET + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        GET + b"content-length: 99999999999999999999\r\n\r\n",
        POST.replace(b"content-length: 10", b"transfer-encoding: chunked") + b"x\r\n",
    ],
)
async def test_what_is_no_http(data: bytes) -> None:
    async with serving() as port:
        status, body = await ask(port, data)
        assert status == 400
        assert json.loads(body)["error"]["code"] == "bad_request"
        assert (await ask(port, GET + b"\r\n"))[0] == 200


async def test_a_large_body_is_no_large_head() -> None:
    data = b"x" * 1_000_000
    async with serving() as port:
        head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"
        assert await ask(port, head, data) == (200, data)
        chunked = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        assert await ask(port, chunked, b"3\r\nabc\r\n" * 1000, b"0\r\n\r\n") == (200, b"abc" * 1000)


@pytest.mark.parametrize("piece", [GET, b"GET", POST, POST + b"01234"])
async def test_a_request_that_stops_half_way(piece: bytes) -> None:
    async with serving(HASTY) as port:
        status, body = await ask(port, piece)
        assert status == 408
        assert b"did not arrive in time" in body


async def test_a_connection_on_which_nothing_comes() -> None:
    async with serving(HASTY) as port, connected(port) as (reader, _):
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_a_request_that_drips() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        while True:
            writer.write(b"a: b\r\n"[:1])
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(HASTY) as port, connected(port) as connection:
        dripping = asyncio.create_task(drip(connection[1]))
        assert (await answer(connection))[0] == 408
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


async def test_what_a_body_brings_gives_it_more_time() -> None:
    async with serving(dataclasses.replace(HASTY, min_bytes_per_s=1)) as port, connected(port) as connection:
        connection[1].write(POST + b"01234")
        await asyncio.sleep(0.3)  # three times what a request has that brings nothing
        connection[1].write(b"56789")
        assert await answer(connection) == (200, b"0123456789")


async def test_an_idle_connection_is_kept_between_requests() -> None:
    """It was closed after 5 s (BR-087): the limits of a request do not hold for the pause behind it."""
    async with serving(HASTY) as port, connected(port) as connection:
        connection[1].write(GET + b"\r\n")
        assert await answer(connection) == (200, b"empty")
        await asyncio.sleep(0.3)
        connection[1].write(GET + b"\r\n")
        assert await answer(connection) == (200, b"empty")


async def test_more_connections_than_there_may_be() -> None:
    async with serving(dataclasses.replace(LIMITS, max_connections=2)) as port:
        async with connected(port) as first, connected(port) as second:
            for connection in (first, second):
                connection[1].write(GET + b"\r\n")
                assert (await answer(connection))[0] == 200
            status, body = await ask(port)
            assert status == 503
            assert b"as many connections as it takes" in body
            first[1].write(GET + b"\r\n")
            assert (await answer(first))[0] == 200
        while (await ask(port, GET + b"\r\n"))[0] != 200:  # the two are gone a moment later
            pass
