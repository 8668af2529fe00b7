"""A question gets the right answer through every door: curl, the OpenAI SDK, bare gRPC, the command line and Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from octavo import LLM, Client, SamplingParams
from tests.e2e.harness import Server

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
COMMAND_TIMEOUT_S = 120


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Server) -> None:
    body = json.dumps({"messages": MESSAGES, "temperature": 0})
    command = ["curl", "-sS", "--fail-with-body", f"{server.http_url}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER} | {
        key: value for key, value in choice["message"].items() if key not in ("role", "content")
    }
    assert choice["finish_reason"] == "stop"


@pytest.fixture(scope="module")
def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0)


def test_openai_sdk(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    completion = sdk.chat.completions.create(model=model, messages=MESSAGES, temperature=0)
    assert completion.choices[0].message.content == ANSWER
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (37, 8)


def test_openai_sdk_streams(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    stream = sdk.chat.completions.create(model=model, messages=MESSAGES, temperature=0, stream=True)
    chunks = [choice for chunk in stream for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in chunks) == ANSWER
    assert chunks[-1].finish_reason == "stop"
    assert len(chunks) > 4


def test_grpc_by_reflection_alone(server: Server) -> None:
    """As a client that has never seen the protos: everything it knows of the service, the server told it."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"octavo.v1.InferenceService", "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("octavo.v1.InferenceService").FindMethodByName("Generate")
        request = ParseDict(
            {"chat": {"messages": MESSAGES}, "sampling": {"temperature": 0}}, GetMessageClass(method.input_type)()
        )
        call = channel.unary_stream(
            "/octavo.v1.InferenceService/Generate",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        responses = [MessageToDict(response) for response in call(request, timeout=60)]
    deltas = [delta for response in responses for delta in response.get("deltas", [])]
    assert "".join(delta.get("text", "") for delta in deltas) == ANSWER
    assert deltas[-1]["finishReason"] == "FINISH_REASON_STOP"


def test_octavo_chat(server: Server) -> None:
    command = [sys.executable, "-m", "octavo.cli", "chat", "--address", server.grpc_address]
    command += ["--temperature", "0", "--message", QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert (done.returncode, done.stdout.strip()) == (0, ANSWER), done.stderr


def test_client(server: Server) -> None:
    with Client(server.grpc_address) as client:
        output = client.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=64))
    assert output.outputs[0].text == ANSWER


def test_llm() -> None:
    with LLM(dtype="float32", num_device_blocks=200) as llm:
        (output,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    assert output.outputs[0].text == ANSWER
    assert output.outputs[0].finish_reason == "stop"
