"""Tool calls of the default model, with the template that comes along and OpenAI's own client.

The model is too small to choose well between tools, so what it says of its own accord is not looked at: what counts is
that required calls are calls, whole, streamed and resumed, and that their arguments match the schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import openai
import pytest
from google.protobuf import json_format

from octavo import Client, SamplingParams
from octavo.v1 import inference_pb2 as pb
from tests.e2e.harness import CALL_TIMEOUT_S, Server, running

UNITS = ("celsius", "fahrenheit")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "unit": {"enum": list(UNITS)},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "unit", "days"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "description": "Tells the time."}}
TOOLS: list[Any] = [WEATHER, NOW]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius, for 3 days?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(chat_template="hermes", max_model_len=2048, num_device_blocks=400) as own:
        yield own


@pytest.fixture(scope="module")
def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0, timeout=CALL_TIMEOUT_S)


def calls_of(choice: Any) -> list[Any]:
    """The calls of a choice, of which there is at least one."""
    assert choice.message.tool_calls
    return list(choice.message.tool_calls)


def check_weather(arguments: str) -> None:
    """The arguments are what the schema of get_weather admits."""
    values = json.loads(arguments)
    assert values.keys() == {"city", "unit", "days"}
    assert isinstance(values["city"], str)
    assert len(values["city"]) <= 30
    assert values["unit"] in UNITS
    assert 1 <= values["days"] <= 9


def test_a_named_tool_is_called_with_arguments_that_match(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    for seed in range(3):
        answer = sdk.chat.completions.create(
            model=model, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, temperature=1.0, seed=seed, max_tokens=200
        )
        (choice,) = answer.choices
        (call,) = calls_of(choice)
        assert call.function.name == "get_weather"
        check_weather(call.function.arguments)
        assert choice.message.content is None
        assert choice.finish_reason == "stop"


def test_a_required_call_is_one_of_the_tools(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    answer = sdk.chat.completions.create(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=2,
        temperature=0.8, seed=5, max_tokens=200,
    )  # fmt: skip
    for choice in answer.choices:
        (call,) = calls_of(choice)
        assert call.function.name in ("get_weather", "get_time")
        if call.function.name == "get_weather":
            check_weather(call.function.arguments)
        else:
            assert json.loads(call.function.arguments) == {}
        assert choice.finish_reason == "tool_calls"


def test_a_streamed_call_is_the_whole_one(sdk: openai.OpenAI) -> None:
    options: Any = {
        "model": sdk.models.list().data[0].id, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required",
        "parallel_tool_calls": False, "temperature": 0, "max_tokens": 200,
    }  # fmt: skip
    whole = calls_of(sdk.chat.completions.create(**options).choices[0])
    with sdk.chat.completions.stream(**options) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert described(calls_of(final)) == described(whole)
    assert len(pieces) > 1
    assert final.finish_reason == "tool_calls"


def described(calls: Iterable[Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    return [(call.function.name, call.function.arguments) for call in calls]


def test_a_conversation_with_tools_goes_on_in_words(sdk: openai.OpenAI) -> None:
    """The turns of a call and its answer are rendered, and the model speaks of what the tool said."""
    call = {
        "id": "call_1", "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius", "days": 3}'},
    }  # fmt: skip
    turns: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"forecast": "18 degrees celsius and sunny"}'},
    ]
    model = sdk.models.list().data[0].id
    answer = sdk.chat.completions.create(
        model=model, messages=turns, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=60
    )
    assert "18" in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_of_free_choice_is_content_or_calls(server: Server, strict: bool) -> None:
    tools = [{"type": "function", "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
    body = {"messages": MESSAGES, "tools": tools, "temperature": 0, "max_tokens": 60, "logprobs": True}
    answer = httpx.post(f"{server.http_url}/v1/chat/completions", json=body, timeout=CALL_TIMEOUT_S).json()
    (choice,) = answer["choices"]
    # With a grammar that leaves text free, the words are those of the answer without one.
    assert choice["message"]["content"].startswith("To call a function")
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


def test_the_python_client_gets_calls(server: Server) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    with Client(server.grpc_address) as client:
        (sample,) = client.chat(MESSAGES, params, tools=TOOLS, tool_choice="get_weather").outputs
    (call,) = sample.tool_calls
    assert call.name == "get_weather"
    check_weather(call.arguments)
    assert sample.content == ""
    assert sample.text.startswith("<tool_call>")


def test_a_call_that_was_cut_goes_on_behind_the_cut(server: Server) -> None:
    """The caller holds half of a call; the other half comes without a word of the first."""
    request = json_format.ParseDict(
        {
            "chat": {
                "messages": MESSAGES,
                "tools": [
                    {"name": "get_weather", "parametersJson": json.dumps(WEATHER["function"]["parameters"])},
                ],
                "toolChoice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"},
                "parallelToolCalls": False,
            },
            "sampling": {"temperature": 0, "seed": 7},
            "stop": {"maxTokens": 200},
            "output": {"returnPromptTokenIds": True},
        },
        pb.GenerateRequest(),
    )  # fmt: skip
    responses = list(server.start(request))
    deltas = [delta for response in responses for delta in response.deltas]
    check_weather(arguments_of(deltas))
    half = len(deltas) // 2
    held = deltas[:half]
    assert arguments_of(held)
    resumed = pb.GenerateRequest()
    resumed.CopyFrom(request)
    resumed.resume.prompt_token_ids.extend(responses[0].prompt.token_ids)
    resumed.resume.seed, resumed.resume.model_digest = 7, responses[0].prompt.model_digest
    resumed.resume.samples.add(
        sample_index=0,
        token_ids=[token_id for delta in held for token_id in delta.token_ids],
        text_byte_count=sum(len(delta.text.encode()) for delta in held),
    )
    rest = [delta for response in server.start(resumed) for delta in response.deltas]
    assert not any(call.name or call.id for delta in rest for call in delta.parsed.tool_calls)
    assert arguments_of(held) + arguments_of(rest) == arguments_of(deltas)
    assert rest[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS


def arguments_of(deltas: list[pb.SampleDelta]) -> str:
    """The arguments of the only call, as far as these deltas bring them."""
    return "".join(call.arguments_json for delta in deltas for call in delta.parsed.tool_calls)


def test_calls_are_items_of_a_response(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    request: Any = {
        "model": model,
        "input": MESSAGES[0]["content"],
        "tools": [{"type": "function", **WEATHER["function"], "strict": True}],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "temperature": 1.0,
        "max_output_tokens": 200,
        "extra_body": {"seed": 1},
    }
    (call,) = sdk.responses.create(**request).output
    assert call.type == "function_call"
    check_weather(call.arguments)
    events = list(sdk.responses.create(**request, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert events[-1].type == "response.completed"
    # What the call gave goes back behind the items, as they came.
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    items: Any = [{"role": "user", "content": request["input"]}, call.model_dump(exclude_none=True), output]
    answer = sdk.responses.create(model=model, input=items, tools=request["tools"], max_output_tokens=20)
    assert answer.usage is not None
    assert answer.usage.output_tokens
