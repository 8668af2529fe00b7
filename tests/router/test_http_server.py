"""The HTTP front end over real sockets and a fake engine, with httpx, the openai SDK and raw sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from octavo.errors import ConfigError, GenerationError, OverloadedError, UnavailableError
from octavo_router.chat_template import ChatTemplate
from octavo_router.http_routes import Routes
from octavo_router.http_server import HttpServer, bind, make_app
from octavo_router.request import FinishReason
from tests.router.fake_engine import FakeEngine, LineTemplate, make_backend

MAX_REQUEST_BYTES = 100_000


class Served:
    """A server with its engine and clients connected to it."""

    def __init__(self, engine: FakeEngine, url: str) -> None:
        self.engine = engine
        self.url = url
        self.http: httpx.AsyncClient

    def connect(self, transport: httpx.AsyncBaseTransport) -> None:
        self.http = httpx.AsyncClient(base_url=self.url, transport=transport, trust_env=False, timeout=10)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of a request that is refused with this status."""
        return error_of(await self.post(path, **body), status)

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream: parsed JSON, and "[DONE]" as it is."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text.endswith("\n\n")
        lines = response.text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        return [line if line == "data: [DONE]" else strict_json(line.removeprefix("data: ")) for line in lines]


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def app_of(served: Served, template: LineTemplate | ChatTemplate) -> Any:
    backend = make_backend(served.engine, template)
    return make_app(Routes(backend, metrics=served.engine.metrics, max_request_bytes=MAX_REQUEST_BYTES))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A server behind a real socket."""
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    served = Served(FakeEngine(), url)
    served.connect(httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None), verify=False))
    server = HttpServer(app_of(served, LineTemplate()), sock)
    await server.start()
    yield served
    await served.http.aclose()
    await server.stop(1)


@pytest.fixture
async def sdk(served: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of the server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def local() -> AsyncIterator[Served]:
    """The application alone, for what needs no socket."""
    served = Served(FakeEngine(), "http://local")
    served.connect(httpx.ASGITransport(app_of(served, LineTemplate())))
    yield served
    await served.http.aclose()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Capital of France?"}]}


async def test_completion(local: Served) -> None:
    local.engine.cached_tokens = 1
    response = await local.post("/v1/completions", model="tiny-alias", prompt="Hi", seed=-1)
    answer = strict_json(response.text)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tiny-alias",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [{"index": 0, "text": "Paris.", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    (request,) = local.engine.requests
    assert request.sampling.seed == 2**64 - 1
    assert request.stopping.max_tokens == 16


async def test_chat_completion(local: Served) -> None:
    local.engine.matched = "."
    response = await local.post("/v1/chat/completions", **CHAT)
    answer = strict_json(response.text)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": ".",
        }
    ]
    (request,) = local.engine.requests
    assert bytes(request.prompt_token_ids) == b"user: Capital of France?\nassistant:"
    assert request.stopping.max_tokens == 512 - len(request.prompt_token_ids)


async def test_completion_stream(local: Served) -> None:
    local.engine.text = "Hü"
    events = await local.events("/v1/completions", prompt="Hi")
    *chunks, done = events
    assert done == "data: [DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "text_completion"
    assert "usage" not in chunks[0]
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "H", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "ü", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    ]


async def test_unicode_line_ends_do_not_cut_events(local: Served) -> None:
    local.engine.text = "a\u2028\u2029\x85b"
    response = await local.http.post("/v1/completions", json={"prompt": "Hi", "stream": True})
    # str.splitlines ends lines at those characters, and so do clients that read lines with it.
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == local.engine.text


async def test_chat_stream_with_usage(local: Served) -> None:
    """Chunks lacked finish_reason, repeated the role, or had the last text in the same (BR-079 to BR-081)."""
    local.engine.text = "Hü"
    *chunks, usage, done = await local.events("/v1/chat/completions", **CHAT, stream_options={"include_usage": True})
    assert done == "data: [DONE]"
    assert {chunk["object"] for chunk in [*chunks, usage]} == {"chat.completion.chunk"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "H"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "ü"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    ]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 35 + 3


async def test_chat_stream_that_says_its_usage_so_far(local: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, _ = await local.events("/v1/chat/completions", **CHAT, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert counts[-1] == usage["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {usage["usage"]["prompt_tokens"]}


async def test_several_prompts_and_samples(local: Served) -> None:
    body = {"prompt": ["a", "bc"], "n": 2, "echo": True}
    answer = (await local.post("/v1/completions", **body)).json()
    texts = ["aParis.", "aParis.", "bcParis.", "bcParis."]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 24
    assert [request.request_id.rpartition("-")[2] for request in local.engine.requests] == ["0", "1"]

    *chunks, done = await local.events("/v1/completions", **body)
    assert done == "data: [DONE]"
    streamed = [""] * 4
    reasons: list[list[str]] = [[] for _ in range(4)]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert streamed == texts
    assert reasons == [["stop"]] * 4


async def test_one_refused_prompt_of_several_refuses_all(local: Served) -> None:
    local.engine.hold_after = 0
    error = await local.refused("/v1/completions", prompt=["a", ""])
    assert error["param"] == "prompt"
    assert not local.engine.running


async def test_the_openai_sdk(served: Served, sdk: openai.AsyncOpenAI) -> None:
    chat = await sdk.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].message.content == "Paris."
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    first = chat.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("P", -0.25, [80])
    assert [top.token for top in first.top_logprobs] == ["P", "Q"]
    stream = await sdk.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Paris."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    completion = await sdk.completions.create(model="tiny", prompt=[72, 105], logprobs=1, max_tokens=2)
    assert completion.choices[0].text == "Pa"
    assert [model.id async for model in sdk.models.list()] == ["tiny", "tiny-alias"]
    with pytest.raises(openai.BadRequestError, match="temperature is 3; it must be from 0 to 2"):
        await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=3)
    with pytest.raises(openai.NotFoundError):
        await sdk.completions.create(model="other", prompt="x")


async def test_completion_logprobs_count_from_the_prompts_start(local: Served) -> None:
    local.engine.text = "aé."
    local.engine.finish_reason = FinishReason.LENGTH
    answer = (await local.post("/v1/completions", prompt="pré", logprobs=1)).json()
    logprobs = {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "."],
        "token_logprobs": [-0.25] * 4,
        "top_logprobs": [{"a": -0.25}, {"bytes:\\xc3": -0.25}, {"bytes:\\xa9": -0.25}, {".": -0.25}],
        "text_offset": [3, 4, 4, 5],
    }
    assert answer["choices"][0]["logprobs"] == logprobs
    assert answer["choices"][0]["finish_reason"] == "length"
    # The same for ids, and joined from a stream.
    *chunks, _ = await local.events("/v1/completions", prompt=list("pré".encode()), logprobs=1)
    joined: dict[str, list[Any]] = {name: [] for name in logprobs}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == logprobs
    answer = (await local.post("/v1/completions", prompt="p", logprobs=0)).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.25}


def joined_logprobs(chunks: list[Any]) -> dict[str, list[Any]]:
    """The log-probabilities of a stream's only choice."""
    joined: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    return joined


@pytest.mark.parametrize("prompt", ["éa", list("éa".encode())])
async def test_echoed_logprobs_begin_with_the_prompts(local: Served, prompt: Any) -> None:
    local.engine.text = "b."
    answer = (await local.post("/v1/completions", prompt=prompt, echo=True, logprobs=1)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "éab."
    logprobs = {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "a", "b", "."],
        "token_logprobs": [None, -0.25, -0.5, -0.25, -0.25],
        "top_logprobs": [
            None,
            {"bytes:\\xaa": -0.125, "bytes:\\xa9": -0.25},
            {"b": -0.125, "a": -0.5},
            {"b": -0.25},
            {".": -0.25},
        ],
        "text_offset": [0, 0, 1, 2, 3],
    }
    assert choice["logprobs"] == logprobs
    assert "prompt_logprobs" not in choice
    *chunks, _ = await local.events("/v1/completions", prompt=prompt, echo=True, logprobs=1)
    assert joined_logprobs(chunks) == logprobs
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "éab."
    assert chunks[0]["choices"][0]["text"] == "éa"


async def test_logprobs_0_are_the_tokens_own(local: Served) -> None:
    (choice,) = (await local.post("/v1/completions", prompt="Hi", echo=True, logprobs=0)).json()["choices"]
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -0.25]
    assert choice["logprobs"]["top_logprobs"][:3] == [None, {"i": -0.25}, {"P": -0.25}]


async def test_the_prompt_alone_is_scored(local: Served) -> None:
    """As evaluations ask: no token is generated."""
    body = {"prompt": ["Hi", "Ho!"], "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}
    answer = (await local.post("/v1/completions", **body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["Hi", "Hi", "Ho!", "Ho!"]
    assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [["H", "i"]] * 2 + [["H", "o", "!"]] * 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    *chunks, _ = await local.events("/v1/completions", **body | {"prompt": "Hi", "n": 1})
    assert joined_logprobs(chunks)["token_logprobs"] == [None, -0.25]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    error = await local.refused("/v1/completions", prompt="x", max_tokens=0)
    assert (error["param"], "at least 1" in error["message"]) == ("max_tokens", True)


async def test_logprobs_of_long_prompts(local: Served) -> None:
    """Which are written in a thread."""
    body = {"prompt": ["ab" * 200, "c" * 90], "echo": True, "logprobs": 1, "max_tokens": 1}
    choices = (await local.post("/v1/completions", **body)).json()["choices"]
    assert ["".join(choice["logprobs"]["tokens"]) for choice in choices] == ["ab" * 200 + "P", "c" * 90 + "P"]
    *chunks, _ = await local.events("/v1/completions", **body)
    texts = ["", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += "".join((choice["logprobs"] or {"tokens": []})["tokens"])
    assert texts == ["ab" * 200 + "P", "c" * 90 + "P"]


async def test_prompt_logprobs_are_vllms(local: Served) -> None:
    expected = [
        None,
        {
            "105": {"logprob": -0.25, "rank": 2, "decoded_token": "i"},
            "106": {"logprob": -0.125, "rank": 1, "decoded_token": "j"},
        },
    ]
    answer = (await local.post("/v1/completions", prompt="Hi", prompt_logprobs=2)).json()
    assert answer["choices"][0]["prompt_logprobs"] == expected
    assert answer["choices"][0]["logprobs"] is None
    # The prompt's own token has no rank where it is not among the likeliest; what echo shows is not more.
    answer = (await local.post("/v1/completions", prompt="Hi", prompt_logprobs=1, echo=True, logprobs=2)).json()
    assert answer["choices"][0]["prompt_logprobs"][1]["105"]["rank"] is None
    assert len(answer["choices"][0]["prompt_logprobs"][1]) == 2
    *chunks, _ = await local.events("/v1/completions", prompt="Hi", prompt_logprobs=2)
    assert [chunk["choices"][0].get("prompt_logprobs") for chunk in chunks] == [expected] + [None] * (len(chunks) - 1)
    answer = (await local.post("/v1/chat/completions", **CHAT, prompt_logprobs=0)).json()
    assert answer["prompt_logprobs"][:2] == [None, {"115": {"logprob": -0.25, "rank": None, "decoded_token": "s"}}]
    error = await local.refused("/v1/chat/completions", **CHAT, prompt_logprobs=0, stream=True)
    assert error["param"] == "prompt_logprobs"


async def test_chat_logprobs_without_top_logprobs(local: Served) -> None:
    """Chats that asked for logprobs alone were refused (BR-048)."""
    answer = (await local.post("/v1/chat/completions", **CHAT, logprobs=True, max_tokens=1)).json()
    entry = {"token": "P", "logprob": -0.25, "bytes": [80], "top_logprobs": []}
    assert answer["choices"][0]["logprobs"] == {"content": [entry], "refusal": None}
    error = await local.refused("/v1/chat/completions", **CHAT, top_logprobs=3)
    assert error["param"] == "top_logprobs"


async def test_null_is_absent(local: Served) -> None:
    """Optional fields sent as null were refused (BR-077)."""
    from octavo_router.openai_schema import ChatCompletionBody, CompletionBody

    nulls = {name: None for name in CompletionBody.model_fields if name != "prompt"}
    assert (await local.post("/v1/completions", prompt="x", **nulls)).status_code == 200
    nulls = {name: None for name in ChatCompletionBody.model_fields if name != "messages"}
    assert (await local.post("/v1/chat/completions", **CHAT, **nulls)).status_code == 200
    first, second = local.engine.requests
    assert first.stopping.max_tokens == 16
    assert second.stopping.max_tokens > 16


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "x", "temperature": -1}, "temperature", "temperature is -1; it must be from 0 to 2"),
        ({"prompt": "x", "temperature": 1e300}, "temperature", "temperature is inf"),
        ({"prompt": "x", "top_p": 0}, "top_p", "top_p is 0; it must be above 0"),
        ({"prompt": "x", "top_p": -0.1}, "top_p", "top_p is -0.1"),
        ({"prompt": "x", "top_k": -2}, "top_k", "top_k is -2"),
        ({"prompt": "x", "n": 0}, "n", "n is 0; it must be at least 1"),
        ({"prompt": "x", "n": -1}, "n", "n is -1; it must be at least 1"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "max_tokens is -1; it must be at least 1"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; it must be a valid integer"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", 'max_tokens is "5"; it must be a valid integer'),
        ({"prompt": "x", "max_tokens": 10**12}, "max_tokens", "from 1 to 4294967295"),
        ({"prompt": "x" * 500, "max_tokens": 100}, "max_tokens", "the prompt has 500 tokens and max_tokens is 100"),
        ({"prompt": "x" * 600}, "prompt", "the prompt has at least 600 tokens; at most 512"),
        ({"prompt": "x", "stop": ""}, "stop", "empty string"),
        ({"prompt": "x", "stop": ["x", 5]}, "stop", "it must be a string or a list of strings"),
        ({"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids", "holds 1000000"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids", "holds -1"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs is 21; it must be from 0 to 20"),
        ({"prompt": "x", "logprobs": -1}, "logprobs", "logprobs is -1"),
        ({"prompt": "x", "seed": 2**64}, "seed", "seed is 18446744073709551616"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21; it must be from 0 to 20"),
        ({"prompt": "x", "echo": True, "max_tokens": 0, "best_of": 2}, "max_tokens", "at least 1 with best_of above n"),
        ({"prompt": "x", "echo": True, "max_tokens": 0, "use_beam_search": True}, "max_tokens", "with beam search"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of", "best_of is 2; it must be at least n, which is 3"),
        ({"prompt": "x", "best_of": 129}, "best_of", "best_of is 129"),
        ({"prompt": "x", "best_of": 3, "n": 2, "stream": True}, "best_of", "they cannot be streamed"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", "presence_penalty is 3; it must be from -2 to 2"),
        ({"prompt": "x", "logit_bias": {"5": 1000}}, "logit_bias", "1000"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "it must be from 0.01 to 100"),
        ({"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias", "logit_bias holds 300"),
        ({"prompt": "x", "logit_bias": {"foo": 0}}, "logit_bias", 'has the key "foo"'),
        ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "forbids every token"),
        ({"prompt": "x", "bad_words": [""]}, "bad_words", "every word must have a character"),
        ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"bad": 1}}}},
         "response_format", "json_schema cannot be enforced"),
        ({"prompt": "x", "guided_json": {"bad": 1}}, "guided_json", "json_schema cannot be enforced"),
        ({"prompt": "x", "structured_outputs": {"regex": "bad"}}, "structured_outputs", "regex cannot be enforced"),
        ({"prompt": "x", "guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos together with a grammar"),
        ({"prompt": "x", "guided_regex": "a", "use_beam_search": True}, "guided_regex", "together with beam search"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not offered"),
        ({"prompt": "x", "use_beam_search": True, "beam_width": 65}, "beam_width", "it must be from 1 to 64"),
        ({"prompt": "x", "use_beam_search": True, "beam_width": 2, "n": 3}, "n", "at most beam_width, which is 2"),
        ({"prompt": "x", "use_beam_search": True, "beam_width": 2, "best_of": 3}, "best_of", "give one of them"),
        ({"prompt": "x", "use_beam_search": True, "temperature": 0.5}, "temperature", "0 or 1, or left out"),
        ({"prompt": "x", "use_beam_search": True, "stop": "x"}, "stop", "together with beam search is not offered"),
        ({"prompt": "x", "use_beam_search": True, "logprobs": 1}, "logprobs", "together with beam search"),
        ({"prompt": "x", "use_beam_search": 1}, "use_beam_search", "it must be a valid boolean"),
        ({"prompt": "x", "use_beam_search": True, "early_stopping": 5}, "early_stopping", 'true, false or "never"'),
        ({"prompt": "x", "beam_width": 3}, "beam_width", "set use_beam_search to true"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation", "not offered"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "set stream to true"),
        ({"prompt": "x", "temprature": 1}, "temprature", "unknown field temprature"),
        ({"prompt": "x", "stream": "true"}, "stream", "stream is"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": None}, "prompt", "prompt is null"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [""]}, "prompt", "empty"),
        ({"prompt": [999999]}, "prompt", "999999"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [[1, 2], [10**9]]}, "prompt", "1000000000"),
        ({"prompt": [5279552648203111001]}, "prompt", "5279552648203111001"),
        ({"prompt": [True]}, "prompt", "it must be a string, a list of strings"),
        ({"prompt": "x", "request_id": "a\nb"}, "request_id", "printable"),
    ],
)  # fmt: skip
async def test_refused_completions(local: Served, body: dict[str, Any], param: str, message: str) -> None:
    error = await local.refused("/v1/completions", **body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]
    assert not local.engine.running


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "messages is empty"),
        ({}, "messages", "messages is missing"),
        ({"messages": "x"}, "messages", "it must be a valid"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content", 'part type "image_url" is not offered'),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5; it must be a string"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour", "unknown field"),
        ({"messages": [{"role": "system"}, {"role": "system"}]}, "messages", "only one system message"),
        ({**CHAT, "chat_template": "x"}, "chat_template", "not offered"),
        ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
        ({**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ],
)  # fmt: skip
async def test_refused_chats(local: Served, body: dict[str, Any], param: str, message: str) -> None:
    error = await local.refused("/v1/chat/completions", **body)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {**CHAT, "tool_choice": "none", "tools": [], "parallel_tool_calls": False, "response_format": {"type": "text"}},
        {**CHAT, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}},
        {**CHAT, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "cache_salt": "s"},
        {**CHAT, "best_of": 3, "n": 2, "length_penalty": 1, "use_beam_search": False},
        {**CHAT, "use_beam_search": True, "n": 2, "temperature": 0, "top_p": 1, "top_k": -1, "stream": False},
        {**CHAT, "top_k": 10**10, "top_p": 1e-9, "min_p": 1.0, "n": 1, "best_of": 1, "temperature": 1e-12},
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "content": [{"type": "text", "text": "18"}], "tool_call_id": "c1"},
        ]},
    ],
)  # fmt: skip
async def test_accepted_chats(local: Served, body: dict[str, Any]) -> None:
    response = await local.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text


async def test_bodies_that_are_no_json(local: Served) -> None:
    """A body in another encoding crashed the parser (BR-044)."""
    for body in (b"", b"{", b"x", b"[]", '{"prompt": "你好"}'.encode("gbk"), b'{"prompt": "\xff"}', b'{"prompt": NaN}'):
        response = await local.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        error_of(response, 400)


async def test_a_body_over_the_limit(served: Served) -> None:
    error = await served.refused("/v1/completions", 413, prompt="x" * MAX_REQUEST_BYTES)
    assert str(MAX_REQUEST_BYTES) in error["message"]
    # Just below the limit it is read in a thread.
    assert (await served.refused("/v1/completions", prompt="x" * (MAX_REQUEST_BYTES - 100)))["param"] == "prompt"
    assert (await served.post("/v1/completions", prompt="x" * (3 * MAX_REQUEST_BYTES))).status_code == 413
    assert (await served.post("/v1/completions", prompt="x")).status_code == 200


async def test_routes_that_are_none(local: Served) -> None:
    assert error_of(await local.http.get("/v1/nothing"), 404)["code"] == "not_found"
    error = error_of(await local.http.get("/v1/completions"), 405)
    assert "allowed: POST" in error["message"]


async def test_errors_of_the_engine(local: Served) -> None:
    local.engine.refusal = OverloadedError("full", retry_after_s=2.1)
    for stream in (False, True):
        response = await local.post("/v1/completions", prompt="x", stream=stream)
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "3"
    local.engine.refusal = UnavailableError("draining")
    await local.refused("/v1/completions", 503, prompt="x")
    error = await local.refused("/v1/completions", 404, prompt="x", model="other")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_failure_before_the_first_token_is_a_status(local: Served, path: str) -> None:
    """Streams ended with [DONE] as if nothing had happened (BR-085)."""
    local.engine.failure = GenerationError("its logits were not finite")
    prompt: dict[str, Any] = CHAT if "chat" in path else {"prompt": "x"}
    for stream in (False, True):
        error = await local.refused(path, 500, **prompt, stream=stream)
        assert error["message"] == "its logits were not finite"


async def test_a_failure_behind_the_first_token_is_an_event(served: Served, sdk: openai.AsyncOpenAI) -> None:
    served.engine.failure, served.engine.fail_at = RuntimeError("secret"), 2
    *chunks, last = await served.events("/v1/completions", prompt="x")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Pa"
    assert last["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(last)
    stream = await sdk.completions.create(model="tiny", prompt="x", stream=True)
    assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["P", "a"]
    with pytest.raises(openai.APIError, match="internal error"):
        await anext(stream)
    served.engine.failure = None
    assert (await served.post("/v1/completions", prompt="x")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 2])
async def test_a_client_that_goes_away_is_cancelled_at_once(served: Served, stream: bool, hold_after: int) -> None:
    served.engine.hold_after = hold_after
    body = json.dumps({"prompt": ["x", "y"], "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    while len(served.engine.running) < 2:
        served.engine.on_submit.clear()
        await served.engine.on_submit.wait()
    if stream and hold_after:
        await reader.readuntil(b"data: ")
    writer.close()
    while len(served.engine.cancelled) < 2:
        served.engine.on_cancel.clear()
        await served.engine.on_cancel.wait()
    assert not served.engine.running
    served.engine.released.set()
    assert (await served.post("/v1/completions", prompt="x")).status_code == 200
    assert len(served.engine.cancelled) == 2


async def test_requests_that_end_are_not_cancelled(served: Served) -> None:
    for _ in range(20):
        await served.post("/v1/completions", prompt="x")
        await served.events("/v1/completions", prompt="x")
    assert not served.engine.cancelled


async def test_models(local: Served) -> None:
    listed = (await local.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"][0] == {
        "id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "octavo", "root": "tiny", "parent": None,
        "max_model_len": 512,
    }  # fmt: skip
    assert (await local.http.get("/v1/models/tiny-alias")).json() == listed["data"][1]
    local.engine.model.names = ("org/name",)
    assert (await local.http.get("/v1/models/org/name")).json()["id"] == "org/name"
    assert error_of(await local.http.get("/v1/models/other"), 404)["code"] == "model_not_found"


async def test_health_metrics_version_and_schema(local: Served) -> None:
    for path, status in (("/health", "live"), ("/ready", "ready")):
        assert (await local.http.get(path)).json() == {"status": status}
        assert (await local.http.head(path)).status_code == 200
    local.engine.is_connected = False
    assert (await local.http.get("/ready")).status_code == 503
    assert (await local.http.get("/health")).status_code == 200
    metrics = await local.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "octavo_requests_finished_total" in metrics.text
    assert (await local.http.get("/version")).json().keys() == {"version"}
    document = (await local.http.get("/openapi.json")).json()
    assert "temperature" in document["components"]["schemas"]["ChatCompletionBody"]["properties"]
    assert "content" in document["components"]["schemas"]["Message"]["properties"]


async def test_tokenize_and_detokenize(local: Served) -> None:
    answer = (await local.post("/tokenize", model="tiny", prompt="Hi")).json()
    assert answer == {"count": 2, "max_model_len": 512, "tokens": [72, 105], "token_strs": None}
    answer = (await local.post("/tokenize", prompt="Hi", return_token_strs=True)).json()
    assert answer["token_strs"] == ["<48>", "<69>"]
    chat = (await local.post("/tokenize", **CHAT)).json()
    assert bytes(chat["tokens"]) == b"user: Capital of France?\nassistant:"
    assert (await local.post("/detokenize", tokens=[72, 105])).json() == {"prompt": "Hi"}
    await local.refused("/tokenize")
    # Text above the context is counted, so that its sender sees by how much; not without end.
    assert (await local.post("/tokenize", prompt="x" * (16 * 512))).json()["count"] == 16 * 512
    error = await local.refused("/tokenize", prompt="x" * (16 * 512 + 1))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "8193 tokens; at most 8192" in error["message"]
    assert (await local.refused("/detokenize", tokens=[300]))["param"] == "tokens"
    await local.refused("/detokenize", tokens=[-1])


async def test_request_ids_are_echoed(served: Served) -> None:
    response = await served.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "abc"})
    assert response.headers["x-request-id"] == "abc"
    assert response.json()["id"] == "cmpl-abc"
    assert served.engine.requests[-1].request_id == "abc"
    for bad in (b"x" * 200, b"\xfc"):
        response = await served.http.get("/health", headers={b"x-request-id": bad})
        assert len(response.headers["x-request-id"]) == 32
    assert len((await served.http.get("/nothing")).headers["x-request-id"]) == 32


async def test_many_connections_at_once(served: Served) -> None:
    """Some of a burst got an empty reply (BR-088)."""
    responses = await asyncio.gather(*(served.post("/v1/completions", prompt="x") for _ in range(200)))
    assert {response.status_code for response in responses} == {200}


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use; choose another port"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot serve HTTP on no-such-host"):
        bind("no-such-host.invalid", 8000)


async def test_a_model_without_a_template_completes_but_does_not_chat(local: Served) -> None:
    """A chat of such a model was a 500 (BR-073)."""
    local.connect(httpx.ASGITransport(app_of(local, ChatTemplate("", {}))))
    error = await local.refused("/v1/chat/completions", **CHAT)
    assert "--chat-template" in error["message"]
    assert (await local.post("/v1/completions", prompt="x")).status_code == 200
