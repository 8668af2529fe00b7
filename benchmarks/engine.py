"""The engine alone: a worker that is sent ready-made plans, with no router's work behind them.

What it makes can be passed on to clients as a router would, by `Replay`: the same event for every token of every
stream, ready-made too. So the clients of a served run are just as busy while the engine alone is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from sides import FIRST_PROMPT, Answer, Prompts, SideError
from stream_clients import stream_completion

from octavo.channel import is_serving
from octavo.config import WorkerConfig
from octavo.program import WORKER, Program
from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc

START_TIMEOUT_S = 180.0
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def ready_made_plans(prompts: Prompts, num_tokens: int, *, max_tokens: int, block_size: int) -> list[pb.StepPlan]:
    """The plans that compute `num_tokens` tokens behind each prompt: at most `max_tokens` a step, running sequences
    first, prompts in chunks, and all blocks from the start.
    """
    num_blocks = [-(-(len(prompt) + num_tokens) // block_size) for prompt in prompts]
    ends = [len(prompt) + num_tokens - 1 for prompt in prompts]  # the last token is sampled and not computed
    computed = [0] * len(prompts)
    plans = []
    while computed != ends:
        plan, room = pb.StepPlan(), max_tokens
        for index in sorted(range(len(prompts)), key=lambda index: computed[index] < len(prompts[index])):
            left = len(prompts[index]) - computed[index]
            count = min(room, left if left > 0 else 1)
            if not count or computed[index] == ends[index]:
                continue
            if not computed[index]:
                first = sum(num_blocks[:index])
                plan.new_sequences.add(
                    sequence_id=index + 1,
                    prompt_token_count=len(prompts[index]),
                    token_ids=prompts[index],
                    block_ids=range(first, first + num_blocks[index]),
                )
            plan.scheduled.sequence_ids.append(index + 1)
            plan.scheduled.start_positions.append(computed[index])
            plan.scheduled.token_counts.append(count)
            plan.scheduled.samples.append(count >= left)
            plan.scheduled.new_block_counts.append(0)
            computed[index] += count
            room -= count
        plans.append(plan)
    return plans


class Replay:
    """A server that answers each connection with the same events at the same time, for the clients' sake alone."""

    def __init__(self) -> None:
        self._connections: list[asyncio.Transport] = []
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serves on a port of its own, whose base URL is given."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _ReplayConnection(self._add), "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def _add(self, connection: asyncio.Transport) -> None:
        self._connections.append(connection)
        self._changed.set()

    async def until(self, num_connections: int) -> None:
        """Waits until so many clients have sent their requests."""
        while len(self._connections) < num_connections:
            await self._changed.wait()
            self._changed.clear()

    def send(self, event: bytes) -> None:
        """Sends an event to all."""
        for connection in self._connections:
            connection.write(event)

    def end(self) -> None:
        """Ends all responses."""
        for connection in self._connections:
            connection.close()


class _ReplayConnection(asyncio.Protocol):
    def __init__(self, add: Callable[[asyncio.Transport], None]) -> None:
        self._add = add
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._transport.write(_HEAD)
            self._add(self._transport)


@contextlib.contextmanager
def _giving_way() -> Iterator[None]:
    """Has the calling thread wait for a core rather than stop whoever computes there, where the system can do that:
    what drives an engine stands for a router elsewhere.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


class EngineSide:
    """A worker, driven by plans that were made beforehand, as many ahead as it takes."""

    def __init__(self, name: str, model: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-engine-")
        address = f"unix:{self._folder.name}/worker.sock"
        config = WorkerConfig.from_values({"model": str(model), **settings, "listen": address}, {})
        self._log: list[str] = []
        began_at = time.perf_counter()
        self._program = Program(WORKER, config.to_flags(), lambda name, line: self._log.append(line))
        self.pid = self._program.pid
        while not is_serving(address, timeout_s=1.0):
            if self._program.exit_code() is not None:
                words = "\n".join(self._program.last_lines())
                raise SideError(f"the worker {self._program.describe_exit()}; the end of its log:\n{words}")
            if time.perf_counter() - began_at > START_TIMEOUT_S:
                raise SideError(f"the worker does not serve after {START_TIMEOUT_S:g} s")
            time.sleep(0.05)
        self._epoch = 0
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._connect(address))
        self.run([FIRST_PROMPT], 1)
        self.start_s = time.perf_counter() - began_at

    async def _connect(self, address: str) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._about = await self._stub.Describe(pb.DescribeRequest())
        self.about = self._about.backend
        self.versions = {"octavo-worker": self._about.version}

    def run(self, prompts: Prompts, num_tokens: int, event: bytes | None = None) -> Answer:
        """Computes so many tokens behind each prompt. event: passed on to a client a prompt with every token."""
        return self._loop.run_until_complete(self._run(prompts, num_tokens, event))

    async def _run(self, prompts: Prompts, num_tokens: int, event: bytes | None) -> Answer:
        plans = ready_made_plans(
            prompts,
            num_tokens,
            max_tokens=self._about.max_batched_token_count,
            block_size=self._about.kv_memory.block_size,
        )
        if event is None:
            with _giving_way():
                return await self._execute(plans, len(prompts) * num_tokens, lambda: None)
        replay = Replay()
        async with replay.serving() as address:
            clients = [asyncio.create_task(stream_completion(address, {"prompt": list(prompt)})) for prompt in prompts]
            await replay.until(len(prompts))
            began_cpu_s = time.process_time()
            answer = await self._execute(plans, len(prompts) * num_tokens, lambda: replay.send(event))
            answer.facts["clients_cores"] = (time.process_time() - began_cpu_s) / answer.seconds
            replay.end()
            await asyncio.gather(*clients)
        return answer

    async def _execute(self, plans: Sequence[pb.StepPlan], num_tokens: int, on_step: Callable[[], None]) -> Answer:
        """Runs a session of these plans. Raises SideError if it samples another number of tokens."""
        self._epoch += 1
        opening = pb.RunRequest(
            epoch=self._epoch,
            incarnation=self._about.incarnation,
            step_seq=1,
            open=pb.OpenSession(protocol_version=self._about.protocol_version, router_name="benchmark"),
        )
        requests = deque(
            pb.RunRequest(epoch=self._epoch, incarnation=self._about.incarnation, step_seq=step_seq, plan=plan)
            for step_seq, plan in enumerate(plans, 1)
        )
        call = self._stub.Run()
        await call.write(opening)
        opened = await call.read()
        if not isinstance(opened, pb.RunResponse) or not opened.HasField("opened"):
            raise SideError(f"the worker opened no session: {await call.details()}")
        results: list[pb.StepResult] = []
        begin = time.perf_counter()
        for _ in range(min(self._about.max_plans_in_flight, len(requests))):
            await call.write(requests.popleft())
        while len(results) < len(plans):
            response = await call.read()
            if not isinstance(response, pb.RunResponse):
                raise SideError(f"the worker ended the session: {await call.details()}")
            if not response.HasField("result"):
                continue
            results.append(response.result)
            if requests:
                await call.write(requests.popleft())
            on_step()
        seconds = time.perf_counter() - begin
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        sampled = sum(len(result.token_ids) for result in results)
        if sampled != num_tokens:
            raise SideError(f"the worker sampled {sampled} tokens instead of {num_tokens}")
        busy_us = sum(result.duration_us for result in results)
        gap_us = sum(result.idle_us for result in results[1:])
        return Answer(seconds, {"idle_share": gap_us / (busy_us + gap_us)})

    def close(self) -> None:
        """Ends the worker."""
        self._loop.run_until_complete(self._channel.close())
        self._loop.close()
        self._program.terminate()
        if not self._program.wait(10.0):
            self._program.kill()
            self._program.wait(10.0)
        self._folder.cleanup()
