"""The code in docs/python.md, run as it stands there: with the real model, in a FastAPI app, against a server."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from octavo import Client
from tests.e2e.harness import Server, wait_until

_BLOCK = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks(repository: Path) -> dict[str, str]:
    """The page's code blocks, by the file name in their first line."""
    page = (repository / "docs" / "python.md").read_text(encoding="utf-8")
    found = {match["name"]: match["code"] for match in _BLOCK.finditer(page)}
    assert found.keys() == {"script.py", "app.py", "client.py"}
    assert page.count("```python") == len(found)
    return found


def run_script(code: str, folder: Path) -> str:
    """What a program prints."""
    path = folder / "program.py"
    path.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script(blocks: dict[str, str], tmp_path: Path) -> None:
    lines = run_script(blocks["script.py"], tmp_path).splitlines()
    assert lines[0].startswith("'Hello, my name is' -> ")
    assert any("Paris" in line for line in lines)
    assert re.fullmatch(
        r"Avg prompt throughput: [1-9]\d*\.\d tokens/s, Avg generation throughput: [1-9]\d*\.\d tokens/s, "
        r"Running: 0 seqs, Waiting: 0 seqs, Preempted: 0 seqs, KV cache usage: 0\.0%, Prefix cache hit rate: \d+\.\d%",
        lines[-1],
    )


def test_the_clients(blocks: dict[str, str], server: Server, tmp_path: Path) -> None:
    code = blocks["client.py"].replace("127.0.0.1:50051", server.grpc_address)
    assert "Paris" in run_script(code, tmp_path)


class App:
    """The page's FastAPI app, served by uvicorn on a free port in a thread of this process."""

    def __init__(self, code: str) -> None:
        namespace: dict[str, Any] = {"__name__": "app"}
        exec(compile(code, "app.py", "exec", dont_inherit=True), namespace)
        self.app = namespace["app"]
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), 120, lambda: "the app did not start")
        assert self._server.started

    def num_requests(self) -> int:
        """Requests that the engine has not ended."""
        with Client(self.app.state.engine.address, api_key="") as client:
            return client.state().queue.request_count

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def app(blocks: dict[str, str]) -> Iterator[App]:
    app = App(blocks["app.py"])
    yield app
    app.stop()
    assert not app.app.state.engine.is_running


def test_the_app_answers(app: App) -> None:
    question = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    answer = httpx.post(f"{app.url}/generate", json=question, timeout=120)
    assert answer.status_code == 200
    assert "Paris" in answer.json()["text"]
    refused = httpx.post(f"{app.url}/generate", json={**question, "temperature": 9}, timeout=120)
    assert refused.status_code == 400
    assert "temperature is 9" in refused.json()["detail"]


def test_the_app_streams_and_drops_what_nobody_reads(app: App) -> None:
    question = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = httpx.post(f"{app.url}/generate", json=question, timeout=120).json()["text"]
    with httpx.stream("POST", f"{app.url}/stream", json=question, timeout=120) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert len(events) > 2
    assert "".join(event["text"] for event in events) == whole
    endless = {**question, "prompt": "1, 2, 3, 4, 5, 6, 7, 8,", "max_tokens": 4000}  # it counts on
    with httpx.stream("POST", f"{app.url}/stream", json=endless, timeout=120) as response:
        lines = response.iter_lines()  # kept: dropping it would end the stream
        assert next(lines).startswith("data: ")
        assert app.num_requests() == 1
    wait_until(lambda: app.num_requests() == 0, 30, lambda: "the request of a client that left runs on")
