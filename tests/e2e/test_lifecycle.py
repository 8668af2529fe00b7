"""Stopping and dying: what a client sees when a program ends, a deadline passes or the client itself goes away."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest

from octavo.v1 import admin_pb2
from tests.e2e.harness import Server, request_of, running, wait_until

PROMPT = [17, 91, 203, 5]
LONG = 450


class Stream(threading.Thread):
    """A request read in a thread of its own. Its error, if any, is kept."""

    def __init__(self, server: Server, num_tokens: int = LONG, timeout_s: float = 120.0, prompt: object = None) -> None:
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.error: grpc.RpcError | None = None
        request = request_of(prompt or PROMPT, max_tokens=num_tokens)
        self.call = server.start(request, timeout_s)
        self.start()

    def run(self) -> None:
        try:
            for response in self.call:
                self.tokens.extend(token for delta in response.deltas for token in delta.token_ids)
        except grpc.RpcError as error:
            self.error = error

    def wait_begun(self) -> None:
        wait_until(lambda: bool(self.tokens) or not self.is_alive(), 60, lambda: "no token came")
        assert self.error is None


def test_worker_that_is_killed_comes_back_and_its_streams_go_on(tiny_models: dict[str, Path]) -> None:
    with running(model=str(tiny_models["qwen2-window-tied"])) as own:
        expected = own.generate(PROMPT, max_tokens=LONG).token_ids
        streams = [Stream(own) for _ in range(3)]
        for stream in streams:
            stream.wait_begun()
        before = own.pair.pids()
        os.kill(before["worker"], signal.SIGKILL)
        for stream in streams:
            stream.join(120)
            assert stream.error is None
            assert stream.tokens == expected
        after = own.pair.pids()
        assert after["router"] == before["router"]
        assert after["worker"] != before["worker"]
        (worker,) = own.state().workers
        assert worker.lost_session_count == 1
        own.wait_idle()


def test_default_model_goes_on_behind_a_killed_worker() -> None:
    with running() as own:
        prompt, num_tokens = "The capital of Japan is", 120
        expected = own.generate(prompt, max_tokens=num_tokens).token_ids
        stream = Stream(own, num_tokens, prompt=prompt)
        stream.wait_begun()
        os.kill(own.pair.pids()["worker"], signal.SIGKILL)
        stream.join(120)
        assert stream.error is None
        assert stream.tokens == expected


def test_sigterm_drains(tiny_models: dict[str, Path]) -> None:
    """SIGTERM stopped streams at once (BR-097)."""
    with running(model=str(tiny_models["qwen3-tied"]), grace_period_s=60) as own:
        expected = own.generate(PROMPT, max_tokens=LONG).token_ids
        stream = Stream(own)
        stream.wait_begun()
        own.pair.begin_stop()
        refused = _until_refused(own)
        stream.join(60)
        own.pair.stop()
        assert stream.error is None
        assert stream.tokens == expected
        assert refused.code() == grpc.StatusCode.UNAVAILABLE
        assert own.pair.error is None


def _until_refused(server: Server) -> grpc.RpcError:
    """Asks until it is refused. Raises AssertionError if that does not come."""
    ends_at = time.monotonic() + 20
    while time.monotonic() < ends_at:
        try:
            list(server.start(request_of(PROMPT, max_tokens=1)))
        except grpc.RpcError as error:
            return error
    raise AssertionError("new requests are still taken")


def test_drain_refuses_new_requests_and_finishes_running_ones(tiny_models: dict[str, Path]) -> None:
    with running(model=str(tiny_models["qwen3-dynamic"])) as own:
        stream = Stream(own)
        stream.wait_begun()
        own.admin.Drain(admin_pb2.DrainRequest(), timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            list(own.start(request_of(PROMPT, max_tokens=1)))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        response = httpx.post(f"{own.http_url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, timeout=30)
        assert response.status_code == 503
        assert own.state().draining
        stream.join(60)
        assert stream.error is None
        assert len(stream.tokens) == LONG


def test_cancelled_call_gives_its_blocks_back(tiny_server: Server) -> None:
    stream = Stream(tiny_server)
    stream.wait_begun()
    stream.call.cancel()
    stream.join(30)
    assert stream.error is not None
    assert stream.error.code() == grpc.StatusCode.CANCELLED
    assert len(stream.tokens) < LONG
    tiny_server.wait_idle()


def test_http_client_that_goes_away_gives_its_blocks_back(server: Server) -> None:
    """Streaming, and waiting for an unstreamed answer."""
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
    url = f"{server.http_url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=1.0)
    server.wait_idle()


def test_deadline_ends_a_call_and_gives_its_blocks_back(server: Server) -> None:
    """A handler that was cancelled left its caller without a status (BR-096)."""
    stream = Stream(server, num_tokens=4000, timeout_s=2.0)
    stream.join(30)
    assert stream.error is not None
    assert stream.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < len(stream.tokens) < 4000
    server.wait_idle()


def test_health_and_metrics_answer(tiny_server: Server) -> None:
    assert httpx.get(f"{tiny_server.http_url}/health", timeout=10).status_code == 200
    assert "octavo_" in httpx.get(f"{tiny_server.http_url}/metrics", timeout=10).text
