"""What other servers' users reported about conversations, streams, connections and calls, tried on this one.

Each test names the report it stands for (BR-…) and what went wrong there. Reports that a test elsewhere already tries
are named in that test. `odd` is a tiny model with the peculiarities that some of the reports need.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import numpy as np
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import load_file

from octavo import LLM, SamplingParams
from octavo_router.openai_schema import ChatCompletionBody, CompletionBody
from tests.e2e.completions import Caller, Json
from tests.e2e.harness import CALL_TIMEOUT_S, Server, request_of, running
from tests.e2e.streams import GrpcStream
from tests.worker.checkpoints import write_safetensors

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
HI = [{"role": "user", "content": "Hi"}]
VOCAB_SIZE = 384
NUM_PADDED = 64
# Whoever has this token in the prompt gets logits that are not numbers: a step that fails, as by a switch.
BROKEN_TOKEN = 383
ODD_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != loop.index is odd %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def odd_model(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token and template both bring the beginning of a sequence, the head is wider than the vocabulary."""
    folder = tmp_path_factory.mktemp("odd") / "model"
    shutil.copytree(tiny_models["llama-linear-bias"], folder)
    tensors = {name: values.astype(np.float32) for name, values in load_file(folder / "model.safetensors").items()}
    noise = np.random.RandomState(117).standard_normal((NUM_PADDED, 64)).astype(np.float32)
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embeddings[BROKEN_TOKEN], head[BROKEN_TOKEN] = np.nan, 0
    tensors["model.embed_tokens.weight"] = np.concatenate([embeddings, noise])
    tensors["lm_head.weight"] = np.concatenate([head, 1000 * noise])
    write_safetensors(folder / "model.safetensors", tensors)
    change_json(folder / "config.json", vocab_size=VOCAB_SIZE + NUM_PADDED, torch_dtype="float32")
    change_json(folder / "tokenizer_config.json", chat_template=ODD_TEMPLATE)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = json.loads((folder / "tokenizer_config.json").read_text())["bos_token"]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def odd(odd_model: Path) -> Iterator[Server]:
    """A server of the odd model that runs eight sequences at a time."""
    with running(model=str(odd_model), max_num_seqs=8) as own:
        yield own


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.http_url}{path}", json=body, timeout=CALL_TIMEOUT_S)


def chat(server: Server, messages: list[Json], **body: Any) -> Json:
    """A chat's answer, greedy unless told otherwise. AssertionError unless the status is 200."""
    response = post(server, "/v1/chat/completions", **{"messages": messages, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def chunks_of(server: Server, messages: list[Json], **body: Any) -> list[Json]:
    """The chunks of a streamed chat. AssertionError unless the framing is right to the byte."""
    body = {"messages": messages, "temperature": 0, "stream": True, **body}
    text = post(server, "/v1/chat/completions", **body).text
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


# CHAT: conversations


def test_br072_text_parts_are_the_joined_text(server: Server) -> None:
    """BR-072: content given as a list of text parts failed in the template."""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 2+2?"}]
    roles = ("system", "user")
    in_parts = chat(server, [{"role": role, "content": parts} for role in roles], max_tokens=4)
    joined = chat(server, [{"role": role, "content": "What is 2+2?"} for role in roles], max_tokens=4)
    assert in_parts["usage"]["prompt_tokens"] == joined["usage"]["prompt_tokens"]
    assert in_parts["choices"] == joined["choices"]
    unknown = [{"role": "user", "content": [{"type": "video", "video": "x"}]}]
    response = post(server, "/v1/chat/completions", messages=unknown)
    assert response.status_code == 400
    assert "video" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "system", "content": "Be brief."}, *HI], "System role not supported"),
        ([*HI, *HI], "Roles must alternate"),
    ],
)
def test_br074_what_a_template_raises_is_the_callers_error(odd: Server, messages: list[Json], message: str) -> None:
    """BR-074: a template that raises surfaced as 500."""
    response = post(odd, "/v1/chat/completions", messages=messages)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_br075_the_sequence_begins_once(odd: Server, odd_model: Path) -> None:
    """BR-075: the beginning of a sequence was added by the template and again by the tokenizer."""
    tokenizer = tokenizers.Tokenizer.from_file(str(odd_model / "tokenizer.json"))
    bos = tokenizer.encode("").ids
    assert len(bos) == 1
    expected = bos + tokenizer.encode("user: Hi\nassistant: ", add_special_tokens=False).ids
    assert post(odd, "/tokenize", messages=HI).json()["tokens"] == expected
    assert chat(odd, HI, max_tokens=1)["usage"]["prompt_tokens"] == len(expected)
    # A text that is no conversation gets the tokenizer's own.
    plain = post(odd, "/v1/completions", prompt="Hi", max_tokens=1).json()
    assert plain["usage"]["prompt_tokens"] == len(tokenizer.encode("Hi").ids)
    with LLM(str(odd_model), dtype="float32", num_device_blocks=20) as llm:
        (output,) = llm.chat(HI, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == expected


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/completions", {"prompt": "Hi"}, CompletionBody.model_fields),
        ("/v1/chat/completions", {"messages": HI}, ChatCompletionBody.model_fields),
    ],
)
def test_br077_null_is_left_out(tiny: Caller, path: str, body: Json, fields: Json) -> None:
    """BR-077: optional fields sent as null were refused."""
    given = {**body, "temperature": 0, "max_tokens": 8}
    plain = post(tiny.server, path, **given)
    nulls = post(tiny.server, path, **{**dict.fromkeys(fields), **given})
    assert (plain.status_code, nulls.status_code) == (200, 200), nulls.text
    assert nulls.json()["choices"] == plain.json()["choices"]


def test_br078_an_assistants_turn_is_continued(server: Server) -> None:
    """BR-078: a prefilled turn of the assistant was closed or doubled instead of continued."""
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(server, messages, max_tokens=4, **flags)
    assert answer["choices"][0]["message"]["content"].startswith(" Paris")
    both = post(server, "/v1/chat/completions", messages=messages, **flags | {"add_generation_prompt": True})
    assert both.status_code == 400
    assert "exclude each other" in both.json()["error"]["message"]


# STREAM: streamed answers


def test_br080_chunks_are_framed_and_alike(server: Server) -> None:
    """BR-080: no [DONE], the role in each delta. BR-079: no finish_reason in chunks before the last.

    BR-081: the last text and the finish_reason shared a chunk, whose text clients lost.
    """
    whole = chat(server, CAPITAL, max_tokens=5)["choices"][0]["message"]["content"]
    chunks = chunks_of(server, CAPITAL, max_tokens=5)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all({"index", "delta", "finish_reason"} <= choice.keys() for choice in choices)
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["delta"] == {}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole


def test_br083_each_sample_has_its_index_and_one_end(server: Server) -> None:
    """BR-083: with n above 1 a choice's index was wrong or out of range."""
    chunks = chunks_of(server, CAPITAL, max_tokens=6, n=3, temperature=1.0, seed=83)
    whole = chat(server, CAPITAL, max_tokens=6, n=3, temperature=1.0, seed=83)
    texts, ends = ["", "", ""], [0, 0, 0]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert ends == [1, 1, 1]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


@pytest.mark.parametrize("stream", [True, False])
def test_br085_a_failing_step_is_told_and_harms_nobody(odd: Server, stream: bool) -> None:
    """BR-085: behind a failure before the first token came only [DONE]. BR-099: later callers waited for ever."""
    caller = Caller(odd)
    expected = caller.answer([5, 6, 7])
    for _ in range(3):
        response = caller.post([BROKEN_TOKEN, 5, 6, 7], stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "[DONE]" not in response.text
    assert caller.answer([5, 6, 7]) == expected
    odd.wait_idle()


def test_br086_streams_count_what_whole_answers_count(server: Server) -> None:
    """BR-086: a stream's usage had no total, or counted too little; the end-of-sequence token counts in both."""
    whole = chat(server, CAPITAL, max_tokens=60)
    usage = chunks_of(server, CAPITAL, max_tokens=60, stream_options={"include_usage": True})[-1]["usage"]
    reply = server.reply(CAPITAL, max_tokens=60, ignore_eos=False)
    assert whole["choices"][0]["finish_reason"] == "stop"
    for counted in (usage, whole["usage"]):
        assert counted["completion_tokens"] == len(reply.answers[0].token_ids)
        assert counted["prompt_tokens"] == reply.prompt.token_count
        assert counted["total_tokens"] == counted["prompt_tokens"] + counted["completion_tokens"]


# HTTP: connections


def test_br087_an_idle_connection_stays_open(tiny: Caller) -> None:
    """BR-087: idle connections were closed after 5 s, so that pooled clients ran into a reset."""
    address = urlsplit(tiny.server.http_url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    connection.connect()
    connection.auto_open = 0  # a closed connection is an error, not a reason to open another
    socket = connection.sock
    for idle_s in (0, 8):
        time.sleep(idle_s)
        body = json.dumps({"prompt": [5, 6], "max_tokens": 2})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert (response.status, connection.sock) == (200, socket), response.read()
        response.read()
    connection.close()


def test_br088_a_burst_of_connections_is_answered(odd: Server) -> None:
    """BR-088: of a burst of connections some got an empty reply."""

    async def burst() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=odd.http_url, limits=limits, timeout=CALL_TIMEOUT_S) as client:
            bias = {str(BROKEN_TOKEN): -100.0}  # of so many tokens chance would take it
            body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "logit_bias": bias}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(200)))

    responses = asyncio.run(burst())
    assert {response.status_code for response in responses} == {200}
    assert {response.json()["usage"]["completion_tokens"] for response in responses} == {3}


# GRPC: calls and their end


def test_br097_sigterm_lets_streams_finish(tiny_model: dict[str, Any]) -> None:
    """BR-097: SIGTERM stopped gRPC streams at once."""
    with running(**tiny_model, grace_period_s=60) as own:
        with grpc.insecure_channel(own.grpc_address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            health = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert next(health).status == health_pb2.HealthCheckResponse.SERVING
            streams = [GrpcStream(own, [61 + i] * 10, max_tokens=450) for i in range(3)]
            for stream in streams:
                stream.wait_begun()
            own.pair.begin_stop()
            assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as caught:
                list(own.start(request_of([5], max_tokens=1)))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            for stream in streams:
                answer = stream.finish()
                assert (len(answer.token_ids), answer.finish_reason) == (450, "length")
        own.pair.stop()
        assert own.pair.error is None


# MODEL: what is sampled, and its text


def test_br117_padded_rows_of_the_head_are_never_sampled(odd: Server) -> None:
    """BR-117: ids beyond the tokenizer's were sampled, and broke decoding or the next turn."""
    options = {"max_tokens": 40, "logprobs": 20, "logit_bias": {BROKEN_TOKEN: -100.0}}  # chance would take it in time
    answers = [odd.generate([5, 6, 7], **options)]
    answers += odd.generate_all([[5, 6, 7]] * 4, 4, temperature=1.5, **options)
    for answer in answers:
        assert max(answer.token_ids) < VOCAB_SIZE
        assert max(token_id for entry in answer.top for token_id, _ in entry) < VOCAB_SIZE


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_br118_the_text_is_the_tokenizers(
    tiny: Caller, tiny_models: dict[str, Path], skip_special_tokens: bool
) -> None:
    """BR-118: the tokenizer's own steps behind decoding were not applied."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_models["llama-linear-bias"] / "tokenizer.json"))
    prompts = [[11 + 7 * i, 12, 13 + i] for i in range(10)]
    options = {"max_tokens": 40, "skip_special_tokens": skip_special_tokens, "temperature": 1.5, "seed": 118}
    for answer in tiny.server.generate_all(prompts, 10, **options):
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=skip_special_tokens)
