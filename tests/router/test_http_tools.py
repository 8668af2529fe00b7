"""Tools over HTTP: OpenAI's bodies and answers, with httpx and OpenAI's own client, over a fake engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from octavo_router import chat_templates
from octavo_router.chat_template import ChatTemplate
from octavo_router.http_routes import Routes
from octavo_router.http_server import HttpServer, bind, make_app
from octavo_router.tool_calls import ToolFormat
from tests.router.fake_engine import FakeEngine, make_backend

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京"}}\n</tool_call>'
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather in Tokyo?"}], "tools": [WEATHER]}
PATH = "/v1/chat/completions"


class Served:
    """A server of the template that comes along, and its clients."""

    def __init__(self, tools: ToolFormat | None = None, source: str | None = None) -> None:
        self.engine = FakeEngine(CALL)
        self.engine.model.max_model_len = 4096
        template = ChatTemplate(chat_templates.read("hermes") if source is None else source, {})
        backend = make_backend(self.engine, template, tools or ToolFormat("hermes", takes_tools=True))
        self.app = make_app(Routes(backend, metrics=self.engine.metrics, max_request_bytes=1 << 20))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://local")

    def prompt(self) -> str:
        return bytes(self.engine.requests[-1].prompt_token_ids).decode()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    await served.http.aclose()


@pytest.fixture
async def sdk(served: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of the server, behind a real socket."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    sock = bind("127.0.0.1", 0)
    server = HttpServer(served.app, sock)
    await server.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
    await server.stop(1)


async def test_an_answer_that_is_a_call(served: Served) -> None:
    response = await served.http.post(PATH, json=ASKED)
    (choice,) = response.json()["choices"]
    call_id = choice["message"]["tool_calls"][0].pop("id")
    assert call_id.startswith("call_")
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "東京"}'}},
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "stop_reason": None,
    }  # fmt: skip
    assert json.dumps(WEATHER) in served.prompt()


async def test_an_answer_in_words(served: Served) -> None:
    served.engine.text = "Sunny."
    for stream in (False, True):
        response = await served.http.post(PATH, json={**ASKED, "stream": stream})
        assert "tool_calls" not in response.text
    whole = (await served.http.post(PATH, json=ASKED)).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("Sunny.", "stop")


async def test_chunks_of_a_call(served: Served) -> None:
    response = await served.http.post(PATH, json={**ASKED, "stream": True, "logprobs": True})
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    calls = [choice["delta"]["tool_calls"][0] for choice in choices if "tool_calls" in choice["delta"]]
    first, *rest = calls
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": "{"}}
    assert rest[0] == {"index": 0, "function": {"arguments": '"'}}
    assert "{" + "".join(call["function"]["arguments"] for call in rest) == '{"city": "東京"}'
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "tool_calls"
    # Every token's log-probability comes, also of those that are markup.
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == len(CALL.encode())


async def test_openais_client_calls_and_answers(served: Served, sdk: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Weather in Tokyo?"}]
    tools: Any = [WEATHER]
    answer = await sdk.chat.completions.create(model="tiny", messages=messages, tools=tools)
    message = answer.choices[0].message
    assert message.content is None
    calls: Any = message.tool_calls
    (call,) = calls
    assert json.loads(call.function.arguments) == {"city": "東京"}
    # What comes back is what may be sent: the SDK's own message, and the tool's answer in both of its forms.
    for content in ("18", [{"type": "text", "text": "1"}, {"type": "text", "text": "8"}]):
        turns = [*messages, message, {"role": "tool", "tool_call_id": call.id, "content": content}]
        await sdk.chat.completions.create(model="tiny", messages=turns, tools=tools)
        assert served.prompt().endswith(
            f"<|im_start|>user\nWeather in Tokyo?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )


async def test_openais_client_streams_calls(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {**ASKED, "model": "tiny"}
    async with sdk.chat.completions.stream(**options) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    calls: Any = final.choices[0].message.tool_calls
    (call,) = calls
    assert call.function.arguments == '{"city": "東京"}'
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "finish_reason", "begin"),
    [
        ("required", "tool_calls", 'lark:start: call ("\\n" call)*'),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop", "lark:start: call\n"),
        ("auto", "tool_calls", ""),
        (None, "tool_calls", ""),
    ],
)
async def test_choices(served: Served, choice: Any, finish_reason: str, begin: str) -> None:
    response = await served.http.post(PATH, json={**ASKED, "tool_choice": choice})
    assert response.json()["choices"][0]["finish_reason"] == finish_reason
    assert served.engine.requests[0].sampling.rules.grammar.startswith(begin)


async def test_no_choice_leaves_the_text_alone(served: Served) -> None:
    response = await served.http.post(PATH, json={**ASKED, "tool_choice": "none"})
    assert response.json()["choices"][0]["message"]["content"] == CALL


async def test_tokens_of_a_prompt_with_tools(served: Served) -> None:
    tokens = (await served.http.post("/tokenize", json=ASKED)).json()["tokens"]
    await served.http.post(PATH, json=ASKED)
    assert bytes(tokens).decode() == served.prompt()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions are"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "unknown field"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "twice"),
        ({"tool_choice": "any"}, "tool_choice", 'it must be "none", "auto", "required" or'),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", '"allowed_tools" is not offered'),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name", "none of the"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "exclude each other"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools instead"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice instead"),
        (
            {"tool_choice": "required", "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "bad"}}}]},
            "tools",
            "cannot be enforced",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
    ],
)  # fmt: skip
async def test_refused(served: Served, fields: dict[str, Any], param: str, message: str) -> None:
    response = await served.http.post(PATH, json={**ASKED, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


async def test_br076_turns_of_tools_are_rendered_or_refused() -> None:
    """BR-076: an assistant's turn of calls, or a tool's turn in parts, made other servers fail with 500."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    parts = [{"type": "text", "text": "18"}]
    knows, ignorant = Served(), Served(ToolFormat(), "{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    for content in (None, "Let me look."):
        for answer in ("18", parts):
            body = {
                "messages": [
                    {"role": "user", "content": "Weather?"},
                    {"role": "assistant", "content": content, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": answer},
                    {"role": "user", "content": "Thanks"},
                ]
            }
            assert (await knows.http.post(PATH, json=body)).status_code == 200
            error = (await ignorant.http.post(PATH, json=body)).json()["error"]
            assert error["param"] == "messages[1].tool_calls"


async def test_a_template_without_tools_is_named_with_the_remedy() -> None:
    served = Served(ToolFormat(), "{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    response = await served.http.post(PATH, json=ASKED)
    assert response.status_code == 400
    assert "--chat-template hermes" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "tools"
    assert (await served.http.post(PATH, json={**ASKED, "tool_choice": "none"})).status_code == 200
