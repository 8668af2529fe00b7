"""OpenAI's own SDK: synchronous, asynchronous, streaming, tools, and answers parsed into a model's fields."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.ecosystem.conftest import Served

MODEL = "SmolLM2-135M-Instruct"
PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: str
    is_capital: bool


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    listed = [model.id for model in client.models.list()]
    assert MODEL in listed
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_is_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=16)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(
        model=MODEL,
        messages=PARIS,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or (chunks[-1].usage and chunks[-1].usage.total_tokens)


async def test_async_chat(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=16)
        assert "Paris" in (answer.choices[0].message.content or "")
        stream = await client.chat.completions.create(
            model=MODEL, messages=PARIS, temperature=0, max_tokens=16, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=5, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith(" Paris")
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text


def test_tool_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=PARIS, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=80
    )
    call: Any = (answer.choices[0].message.tool_calls or [])[0]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_tool_calls_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=PARIS, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=80
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    call: Any = (final.choices[0].message.tool_calls or [])[0]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_structured_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=PARIS, response_format=City, temperature=0, max_tokens=100
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    assert parsed.name


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="What is the capital of France?", temperature=0)
    assert "Paris" in answer.output_text
    with client.responses.stream(model=MODEL, input="What is the capital of France?", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == answer.output_text
    parsed = client.responses.parse(
        model=MODEL, input="What is the capital of France?", text_format=City, temperature=0, max_output_tokens=100
    )
    assert isinstance(parsed.output_parsed, City)


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=PARIS, temperature=5)
    with pytest.raises(openai.NotFoundError, match="another"):
        client.chat.completions.create(model="another", messages=PARIS)
