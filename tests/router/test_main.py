"""The router as a program: started, watched and stopped from outside, with a fake worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from octavo_router.http_server import bind
from octavo_router.main import main
from tests.router.fake_worker_server import FakeWorkerServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Running:
    """A router in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, ready_file: Path) -> None:
        self.process = process
        self.ready_file = ready_file
        self.ready_line = ""
        self.addresses: dict[str, Any] = {}
        self._lines: list[str] = []
        self._has_more = asyncio.Event()
        # The log is read from the start, which keeps its pipe from filling up.
        self._reading = asyncio.create_task(self._read_log())

    async def until_ready(self) -> None:
        """Waits until it serves."""
        self.ready_line = await self.until_it_says(" ready: ")
        self.addresses = json.loads(self.ready_file.read_text())

    async def until_it_says(self, text: str) -> str:
        """Waits for a line of its log with this text; returns the line."""
        while not (found := [line for line in self._lines if text in line]):
            assert not self._reading.done(), f"it ended: {''.join(self._lines)}"
            self._has_more.clear()
            await self._has_more.wait()
        return found[0]

    async def log(self) -> str:
        """What it wrote to stderr until its end."""
        await self._reading
        return "".join(self._lines)

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self._lines.append(line.decode())
            self._has_more.set()
        self._has_more.set()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorkerServer]:
    worker = FakeWorkerServer()
    await worker.start()
    yield worker
    await worker.stop()


@contextlib.asynccontextmanager
async def router(tmp_path: Path, *flags: str, options: tuple[str, ...] = ()) -> AsyncIterator[Running]:
    ready_file = tmp_path / "ready.json"
    arguments = (*options, "-m", "octavo_router", "--port=0", "--grpc-port=0", f"--ready-file={ready_file}", *flags)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stderr=asyncio.subprocess.PIPE, limit=1 << 24
    )
    try:
        yield Running(process, ready_file)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_it_serves_without_torch_and_stops(worker: FakeWorkerServer, tmp_path: Path) -> None:
    socket_path = tmp_path / "router.sock"
    flags = (f"--worker={worker.address}", f"--grpc-socket={socket_path}", "--served-model-name=abc")
    async with router(tmp_path, *flags, options=("-X", "importtime")) as running:
        await running.until_ready()
        http, address = running.addresses["http"], running.addresses["grpc"]
        assert f"HTTP {http}/v1" in running.ready_line
        assert f"gRPC {address}, unix:{socket_path}" in running.ready_line
        assert running.addresses["pid"] == running.process.pid

        async with httpx.AsyncClient(base_url=http, trust_env=False) as client:
            answer = (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})).json()
            assert answer["choices"][0]["text"] == "abcd"
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            answer = (await client.post("/v1/chat/completions", json=chat)).json()
            assert answer["choices"][0]["message"]["content"] == "abc"
            assert answer["usage"]["prompt_tokens"] == len("user: Hi\nassistant: ")
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "abc"
            assert (await client.get("/ready")).status_code == 200
            assert "octavo_requests_finished_total" in (await client.get("/metrics")).text
        async with grpc.aio.insecure_channel(f"unix:{socket_path}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = pb.GenerateRequest(text="x", stop={"stop": ["ef"]})
            responses = [response async for response in stub.Generate(request)]
            assert "".join(delta.text for response in responses for delta in response.deltas) == "abcd"

        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0
        assert not running.ready_file.exists()
        imported = set(re.findall(r"\| +(\w+)", await running.log()))
        assert {"grpc", "tokenizers", "uvicorn"} <= imported
        assert not {"torch", "transformers", "octavo_worker", "octavo_kernels"} & imported


async def test_what_strangers_send_does_not_fill_the_log(worker: FakeWorkerServer, tmp_path: Path) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade, close\r\n\r\n"
    async with router(tmp_path, f"--worker={worker.address}") as running:
        await running.until_ready()
        port = int(running.addresses["http"].rpartition(":")[2])
        for data, status in ((b"no HTTP\r\n\r\n", b"400"), (upgrade, b"200")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            assert (await reader.readline()).split()[1] == status
            writer.close()
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0
        assert "WARNING" not in await running.log()


async def test_sigterm_lets_running_requests_finish(worker: FakeWorkerServer, tmp_path: Path) -> None:
    async with router(tmp_path, f"--worker={worker.address}") as running:
        await running.until_ready()
        async with (
            httpx.AsyncClient(base_url=running.addresses["http"], trust_env=False) as client,
            grpc.aio.insecure_channel(running.addresses["grpc"]) as channel,
        ):
            stub, health = inference_pb2_grpc.InferenceServiceStub(channel), await watch(channel)
            worker.running.clear()
            calls = [aiter(stub.Generate(pb.GenerateRequest(text="x", stop={"max_tokens": 5}))) for _ in range(3)]
            for call in calls:
                await anext(call)
            posted = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}))
            await until_unfinished(channel, 4)

            running.process.send_signal(signal.SIGTERM)
            assert (await health.read()).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(pb.GenerateRequest(text="x")).read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200

            worker.running.set()
            for call in calls:
                assert "".join([delta.text async for response in call for delta in response.deltas]) == "abcde"
            assert (await posted).json()["choices"][0]["text"] == "abcde"
            assert await running.process.wait() == 0
            assert "Traceback" not in await running.log()


@pytest.mark.parametrize("second_signal", [True, False])
async def test_what_does_not_finish_is_told_so(worker: FakeWorkerServer, tmp_path: Path, second_signal: bool) -> None:
    grace = "100" if second_signal else "0.2"
    async with router(tmp_path, f"--worker={worker.address}", f"--grace-period-s={grace}") as running:
        await running.until_ready()
        async with (
            httpx.AsyncClient(base_url=running.addresses["http"], trust_env=False, timeout=30) as client,
            grpc.aio.insecure_channel(running.addresses["grpc"]) as channel,
        ):
            health = await watch(channel)
            worker.running.clear()
            call = aiter(inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x")))
            await anext(call)
            posted = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
            await until_unfinished(channel, 2)
            running.process.send_signal(signal.SIGINT)
            assert (await health.read()).status == NOT_SERVING
            if second_signal:
                running.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await posted).status_code == 503
            assert await running.process.wait() == 0
            assert "Traceback" not in await running.log()


async def until_unfinished(channel: grpc.aio.Channel, num_requests: int) -> None:
    """Returns when the router has so many requests that have not ended."""
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    for _ in range(1000):
        state = await stub.GetState(admin_pb2.GetStateRequest())
        if state.queue.request_count == num_requests:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the router never had {num_requests} requests")


async def watch(channel: grpc.aio.Channel) -> Any:
    """A Watch of the server's health that has said SERVING."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    call = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await call.read()).status == SERVING
    return call


async def test_before_there_is_a_worker_health_is_answered_and_inference_refused(tmp_path: Path) -> None:
    async with router(tmp_path, f"--worker=unix:{tmp_path / 'worker.sock'}") as running:
        line = await running.until_it_says("taking connections at HTTP ")
        found = re.search(r"(http://\S+)/v1, gRPC ([^;]+);", line)
        assert found
        await running.until_it_says("waiting for the worker at unix:")
        async with httpx.AsyncClient(base_url=found[1], trust_env=False) as client:
            answers = {path: (await client.get(path)).status_code for path in ("/health", "/ready", "/version")}
            assert answers == {"/health": 200, "/ready": 503, "/version": 200}
            chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            for path, body in (("completions", {"prompt": "x"}), ("chat/completions", chat)):
                response = await client.post(f"/v1/{path}", json=body)
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "unavailable"
                assert response.headers["retry-after"] == "2"
            assert (await client.get("/v1/models")).status_code == 503
        async with grpc.aio.insecure_channel(found[2]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(pb.GenerateRequest(text="x")).read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "waits for its first worker" in str(caught.value.details())
            with pytest.raises(grpc.aio.AioRpcError, match="waits for its first worker"):
                await admin_pb2_grpc.AdminServiceStub(channel).GetState(admin_pb2.GetStateRequest())
            health: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == NOT_SERVING
            assert not running.ready_file.exists()
            async with httpx.AsyncClient(trust_env=False) as client:
                metrics = (await client.get(f"{found[1]}/metrics")).text
            assert 'octavo_requests_refused_total{reason="unavailable"} 3.0' in metrics

            worker = FakeWorkerServer(f"unix:{tmp_path / 'worker.sock'}")
            await worker.start()
            try:
                await running.until_ready()
                assert (await health.read()).status == SERVING
                responses = [response async for response in stub.Generate(pb.GenerateRequest(text="x"))]
                assert responses[-1].usage.completion_token_count
            finally:
                await worker.stop()


async def test_a_signal_ends_the_wait_for_a_worker(tmp_path: Path) -> None:
    async with router(tmp_path, f"--worker=unix:{tmp_path / 'nobody.sock'}") as running:
        await running.until_it_says("waiting for the worker at unix:")
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0


async def test_without_http_no_http_stack_is_loaded(worker: FakeWorkerServer, tmp_path: Path) -> None:
    flags = (f"--worker={worker.address}", "--port=-1")
    async with router(tmp_path, *flags, options=("-X", "importtime")) as running:
        await running.until_ready()
        assert running.addresses["http"] == ""
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0
        assert not {"starlette", "uvicorn", "pydantic"} & set(re.findall(r"\| +(\w+)", await running.log()))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--worker=a:1", "--worker=b:2"], "worker names 2 workers"),
        (["--port=-1", "--grpc-port=-1"], "leave one address to serve on"),
        (["--max-num-seqs=0"], "max_num_seqs is 0; it must be from 1"),
        (["--chat-template=/nowhere/t.jinja"], "chat_template is '/nowhere/t.jinja', which cannot be read"),
        (["--grpc-port=0", "--grpc-socket=/nowhere/router.sock"], "the folder must exist and be writable"),
        (["--api-key-file=/nowhere/keys"], "api_key_file /nowhere/keys cannot be read: No such file or directory"),
        (["--api-key=two words"], "api_key must be printable ASCII without spaces and commas"),
        (["--ssl-keyfile=/nowhere/k", "--ssl-certfile=/nowhere/c"], "ssl_keyfile /nowhere/k cannot be read"),
        (["--worker-ssl-keyfile=k"], "worker_ssl_certfile, worker_ssl_ca_certs is missing"),
        (["--allowed-origins=a.test"], "allowed_origins has 'a.test'"),
    ],
)
def test_settings_at_fault_are_one_line_and_exit_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*flags] if "--port=-1" in flags else ["--port=0", *flags]
    assert main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo-router: ")
    assert message in line


@pytest.mark.parametrize(
    ("flags", "warned"),
    [(["--host=0.0.0.0"], True), (["--host=0.0.0.0", "--api-key=k"], False), (["--host=127.0.0.1"], False)],
)
async def test_a_router_that_serves_everybody_says_so(
    flags: list[str], warned: bool, worker: FakeWorkerServer, tmp_path: Path
) -> None:
    async with router(tmp_path, f"--worker={worker.address}", *flags) as running:
        await running.until_ready()
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0
        assert ("everybody who reaches 0.0.0.0 is served" in await running.log()) is warned


async def test_a_router_waits_for_the_token_file_that_its_worker_makes(
    worker: FakeWorkerServer, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    async with router(tmp_path, f"--worker={worker.address}", f"--worker-token-file={token}") as running:
        await running.until_it_says("waiting for worker_token_file")
        token.write_text("a-token\n")
        await running.until_ready()


def test_a_port_in_use_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main([f"--port={port}"]) == 2
        assert main(["--port=0", f"--grpc-port={port}"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert f"127.0.0.1:{port}" in first
    assert "--port" in first
    assert f"127.0.0.1:{port}" in second
    assert "--grpc-port" in second
