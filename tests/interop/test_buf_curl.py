"""`buf curl`: gRPC from a shell, by reflection alone or with our proto files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Server, running

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def buf() -> str:
    """The program, from beside this Python or from the path."""
    found = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    if found is None:
        pytest.skip("buf is not installed")
    return found


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path]) -> Iterator[Server]:
    """A random model that answers at once."""
    with running(model=str(tiny_models["llama-linear-bias"]), max_model_len=512) as server:
        yield server


def curl(buf: str, server: Server, method: str, request: Any, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(request), *flags]
    return subprocess.run(
        [*command, f"http://{server.grpc_address}/{method}"], capture_output=True, text=True, timeout=TIMEOUT_S
    )


REQUEST: dict[str, Any] = {
    "tokenIds": {"ids": [5, 6, 7]},
    "sampling": {"temperature": 0},
    "stop": {"maxTokens": 6, "ignoreEos": True},
}


def messages_of(output: str) -> list[Any]:
    """The JSON objects that stand one behind the other."""
    decoder, messages, text = json.JSONDecoder(), [], output.strip()
    while text:
        message, end = decoder.raw_decode(text)
        messages.append(message)
        text = text[end:].lstrip()
    return messages


def test_generate_streams_by_reflection(buf: str, server: Server) -> None:
    done = curl(buf, server, "octavo.v1.InferenceService/Generate", REQUEST)
    assert done.returncode == 0, done.stderr
    responses = messages_of(done.stdout)
    token_ids = [
        token_id for response in responses for delta in response.get("deltas", []) for token_id in delta["tokenIds"]
    ]
    assert token_ids == server.generate([5, 6, 7], max_tokens=6).token_ids
    assert responses[-1]["usage"]["completionTokenCount"] == 6


def test_generate_with_our_protos(buf: str, server: Server, repository: Path) -> None:
    whole = REQUEST | {"output": {"finalOnly": True}}
    done = curl(buf, server, "octavo.v1.InferenceService/Generate", whole, "--schema", str(repository / "protos"))
    assert done.returncode == 0, done.stderr
    (response,) = messages_of(done.stdout)
    assert response["deltas"][0]["finishReason"] == "FINISH_REASON_LENGTH"


def test_a_mistake_is_a_rich_error(buf: str, server: Server) -> None:
    done = curl(buf, server, "octavo.v1.InferenceService/Generate", {"text": "x", "sampling": {"temperature": 3}})
    assert done.returncode != 0
    error = json.loads(done.stderr)
    assert error["code"] == "invalid_argument"
    assert error["message"] == "temperature is 3; it must be from 0 to 2"
    kinds = {detail["type"] for detail in error["details"]}
    assert {"google.rpc.ErrorInfo", "google.rpc.BadRequest"} <= kinds
