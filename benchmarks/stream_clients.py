"""Clients that only watch streams: they note when messages come, and count the tokens when all is over.

So they take as little of the machine as they can while others are measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import grpc.aio
from fake_worker import LETTERS_PER_TOKEN

from octavo.v1 import inference_pb2, sampling_pb2

Received = list[tuple[float, int]]
"""When messages came, by time.perf_counter, and how many tokens each of them brought."""

Pieces = list[tuple[float, bytes]]
"""What a connection received, in the pieces in which it came, and when."""

_METHOD = "/octavo.v1.InferenceService/Generate"
_STREAMS_PER_CHANNEL = 64


class Clients(Protocol):
    """Connections to a server; an asynchronous context manager that closes them."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def follow(self, prompt: Sequence[int], num_tokens: int) -> Received:
        """Asks for so many tokens behind a prompt and reads to the end."""


class GrpcClients:
    """Streams over a few channels."""

    def __init__(self, address: str, num_streams: int) -> None:
        # Without a pool of its own a channel would share its connection with the others.
        options = [("grpc.use_local_subchannel_pool", 1)]
        num_channels = -(-num_streams // _STREAMS_PER_CHANNEL)
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_channels)]
        self._next = 0

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def follow(self, prompt: Sequence[int], num_tokens: int) -> Received:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=sampling_pb2.SamplingParams(temperature=0),
            stop=sampling_pb2.StopConditions(max_tokens=num_tokens, ignore_eos=True),
        )
        self._next = (self._next + 1) % len(self._channels)
        call = self._channels[self._next].unary_stream(
            _METHOD, request_serializer=inference_pb2.GenerateRequest.SerializeToString
        )
        messages = [(time.perf_counter(), message) async for message in call(request)]
        responses = [(at, inference_pb2.GenerateResponse.FromString(message)) for at, message in messages]
        return [(at, sum(len(delta.token_ids) for delta in response.deltas)) for at, response in responses]


async def stream_completion(address: str, body: dict[str, Any]) -> Pieces:
    """Posts to /v1/completions of a base URL over a connection of its own and reads to the end, unseen."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(_HttpStream, host, int(port))
    stream.send(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
    await stream.ended
    return stream.pieces


class HttpClients:
    """A connection a stream, to /v1/completions."""

    def __init__(self, address: str, num_streams: int) -> None:
        self._address = address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Connections end with their streams."""

    async def follow(self, prompt: Sequence[int], num_tokens: int) -> Received:
        fields = {"prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        pieces = await stream_completion(self._address, {"model": "fake", **fields})
        return [
            (at, sum(len(choice["text"]) for choice in event["choices"]) // LETTERS_PER_TOKEN)
            for at, event in events(pieces)
        ]


class _HttpStream(asyncio.Protocol):
    def __init__(self) -> None:
        self.pieces: Pieces = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.send = transport.write

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


def events(pieces: Pieces) -> list[tuple[float, dict[str, Any]]]:
    """The events of a response, each at the time of the piece that completed it."""
    received = []
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        received += [(at, json.loads(line[len(b"data: ") :])) for line in lines if line.startswith(b"data: {")]
    return received
