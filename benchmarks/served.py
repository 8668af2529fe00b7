"""A router and a worker under load: started as they are served, asked over gRPC with one stream a request.

Measures one request as its client sees it. What is asked, and when, is the benchmarks'.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from octavo.channel import channel_options
from octavo.config import pair_settings
from octavo.process import ProcessPair
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2

START_TIMEOUT_S = 180.0
# Token ids that every model's vocabulary has, without its special tokens, which come first.
TOKEN_IDS = range(300, 10_000)

T = TypeVar("T")


@dataclass
class Running:
    """A request that has been sent, as its client sees it. Times are time.perf_counter's; 0 until they have come.

    prompt_tokens: tokens of its prompt; wanted: tokens, of all samples, with which it has what its client wants;
    num_received: tokens of all samples so far; num_cached: tokens of the prompt that came from the prefix cache.
    """

    prompt_tokens: int
    wanted: int
    sent_at: float = field(default_factory=time.perf_counter)
    first_at: float = 0.0
    ended_at: float = 0.0
    num_received: int = 0
    num_cached: int = 0

    @property
    def first_token_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def latency_s(self) -> float:
        return self.ended_at - self.sent_at

    def add(self, num_tokens: int) -> None:
        """So many tokens came."""
        now = time.perf_counter()
        if not self.num_received:
            self.first_at = now
        self.num_received += num_tokens
        if self.num_received >= self.wanted and not self.ended_at:
            self.ended_at = now


def greedy_request(
    prompt: Sequence[int], num_tokens: int, *, cache_salt: str = "", **sampling: Any
) -> inference_pb2.GenerateRequest:
    """A request that generates exactly `num_tokens` tokens a sample, the likeliest ones unless `sampling` says else."""
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(**{"temperature": 0, **sampling}),
        stop=sampling_pb2.StopConditions(max_tokens=num_tokens, ignore_eos=True),
        cache_salt=cache_salt,
    )


class Connection:
    """A channel to a server. Its coroutines run in an event loop of its own, through `run`."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._channel = self.run(self._connect(address))
        self.inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self.versions = {name: importlib.metadata.version(name) for name in ("torch", "grpcio")}

    async def _connect(self, address: str) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(address, options=channel_options(address))
        await channel.channel_ready()
        return channel

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end."""
        return self._loop.run_until_complete(coroutine)

    async def follow(self, request: inference_pb2.GenerateRequest, running: Running) -> Running:
        """Sends a request and reads its stream to the end; `running` is kept up to date meanwhile, and returned."""
        async for response in self.inference.Generate(request):
            if num_tokens := sum(len(delta.token_ids) for delta in response.deltas):
                running.add(num_tokens)
            if response.HasField("usage"):
                running.num_cached = response.usage.cached_token_count
        return running

    async def ask(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> Running:
        """Generates tokens behind a prompt, as `greedy_request` says."""
        request = greedy_request(prompt, num_tokens, **options)
        return await self.follow(request, Running(len(prompt), num_tokens * (request.sampling.n or 1)))

    async def device_pool(self) -> admin_pb2.PoolState:
        """The device's KV pool right now."""
        state = await self.admin.GetState(admin_pb2.GetStateRequest())
        pool: admin_pb2.PoolState = state.workers[0].device_pool
        return pool

    def close(self) -> None:
        """Lets go of the server."""
        self.run(self._channel.close())
        self._loop.close()


class Served(Connection):
    """The pair, and a connection to it; a context manager that ends it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.log: list[str] = []
        worker, router = pair_settings({**settings, "port": -1, "grpc_port": -1}, environ={})
        self._pair = ProcessPair(worker, router, on_log=lambda name, line: self.log.append(f"{name}: {line}"))
        super().__init__(self._pair.wait_ready(START_TIMEOUT_S).grpc)

    def close(self) -> None:
        """Ends both programs."""
        super().close()
        self._pair.stop(at_once=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
