"""/v1/responses over a fake engine: what becomes of bodies, whole responses, typed events, OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from octavo.errors import GenerationError, InvalidRequestError, UnsupportedError
from octavo.v1 import inference_pb2 as pb
from octavo_router.http_routes import Routes
from octavo_router.http_server import make_app
from octavo_router.openai_body import parse_body
from octavo_router.openai_responses import param_of, responses_request
from octavo_router.openai_responses_answers import ResponseAnswer, ResponseOptions
from octavo_router.openai_responses_schema import ResponsesBody
from octavo_router.request import FinishReason
from tests.router.fake_engine import ByteTokenizer, FakeEngine, make_backend


def request_of(**body: Any) -> pb.GenerateRequest:
    return responses_request(parse_body(ResponsesBody, json.dumps(body).encode()), "r1")


def messages_of(**body: Any) -> list[tuple[str, str]]:
    """Role and text of each message."""
    return [
        (message.role, message.content or "|".join(part.text for part in message.content_parts))
        for message in request_of(**body).chat.messages
    ]


def test_text_is_a_users_message_behind_the_instructions() -> None:
    assert messages_of(input="Hi", instructions="Be brief.") == [("system", "Be brief."), ("user", "Hi")]


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "f", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "18"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "19"}]},
    ]  # fmt: skip
    request = request_of(input=items)
    assert [message.role for message in request.chat.messages] == ["system", "user", "assistant", "tool", "tool"]
    assistant = request.chat.messages[2]
    assert [part.text for part in assistant.content_parts] == ["b"]
    assert [(call.id, call.name, call.arguments_json) for call in assistant.tool_calls] == [
        ("c1", "add", "{}"),
        ("c2", "sub", '{"x":1}'),
    ]
    assert [message.tool_call_id for message in request.chat.messages[3:]] == ["c1", "c2"]


def test_parameters_are_those_of_a_chat_completion() -> None:
    request = request_of(
        input="x", max_output_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=5, stop=["a"], priority=2,
        cache_salt="s", include=["message.output_text.logprobs"], top_logprobs=2, stream=True,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert (request.stop.max_tokens, list(request.stop.stop), request.priority) == (7, ["a"], 2)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 3, 5)
    assert (request.output.logprobs, request.output.final_only, request.cache_salt) == (2, False, "s")
    assert request_of(input="x", include=["message.output_text.logprobs"]).output.logprobs == 0
    assert not request_of(input="x").output.HasField("logprobs")


def test_formats_become_grammars() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    text_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    grammar = request_of(input="x", text={"format": text_format, "verbosity": "medium"}).sampling.grammar
    assert json.loads(grammar.json_schema) == schema
    assert list(json.loads(grammar.json_schema)["properties"]) == ["b", "a"]
    assert request_of(input="x", text={"format": {"type": "json_object"}}).sampling.grammar.json_object
    assert not request_of(input="x", text={"format": {"type": "text"}}).sampling.HasField("grammar")


def test_tools_become_the_contracts() -> None:
    tool = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}, "strict": True}
    named = {"type": "function", "name": "add"}
    chat = request_of(input="x", tools=[tool], tool_choice=named, parallel_tool_calls=False).chat
    (given,) = chat.tools
    assert (given.name, given.description, json.loads(given.parameters_json)) == ("add", "d", {"type": "object"})
    assert (chat.tool_choice.mode, chat.tool_choice.name) == (pb.TOOL_CHOICE_MODE_NAMED, "add")
    assert not chat.parallel_tool_calls
    assert request_of(input="x", tools=[tool], tool_choice="required").chat.tool_choice.mode == (
        pb.TOOL_CHOICE_MODE_REQUIRED
    )


def test_null_and_neutral_values_ask_for_nothing() -> None:
    names = ResponsesBody.model_fields.keys() - {"input"}
    assert request_of(input="x") == request_of(input="x", **dict.fromkeys(names))
    neutral = {"background": False, "store": False, "truncation": "disabled", "reasoning": {"effort": None}}
    told = {"metadata": {"a": "b"}, "service_tier": "auto", "include": ["reasoning.encrypted_content"]}
    assert request_of(input="x") == request_of(input="x", **neutral, **told)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "input", "input is missing"),
        ({"input": [], "instructions": "x"}, "input", "at least one item"),
        ({"input": 5}, "input", "a string or a list of items"),
        ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is missing; a message must have it"),
        ({"input": [{"content": "x"}]}, "input[0].role", "input[0].role is missing"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role", "one of user, assistant, system, developer"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content",
         'part type "input_image" is not offered'),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0]", 'items of type "reasoning" are not offered'),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "is missing"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; it must be at least 1"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is missing"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]", 'tools of type "web_search" are not offered'),
        ({"input": "x", "tool_choice": "all"}, "tool_choice", '"none", "auto", "required"'),
        ({"input": "x", "colour": 1}, "colour", "unknown field colour"),
        ({"input": "x", "stream_options": {"include_obfuscation": False}}, "stream_options", "set stream to true"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused_by_name(body: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_of(**body)
    assert caught.value.field == field
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "this server keeps no responses"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"store": True}, "store", "set it to false or leave it out"),
        ({"background": True}, "background", "not offered"),
        ({"truncation": "auto"}, "truncation", "not offered"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "not offered"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not offered"),
        ({"include": ["web_search_call.results"]}, "include", "message.output_text.logprobs"),
        ({"prompt": {"id": "p"}}, "prompt", "not offered"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(body: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        request_of(input="x", **body)
    assert caught.value.field == field
    assert message in caught.value.message


def test_names_of_the_contract_are_turned_into_the_bodys() -> None:
    assert param_of("stop.max_tokens") == "max_output_tokens"
    assert param_of("chat.messages[2].role") == "input"
    assert param_of("sampling.grammar.json_schema") == "text.format"
    assert param_of("chat.tools[0].parameters_json") == "tools[0].parameters"
    assert param_of("chat.tool_choice.name") == "tool_choice.name"
    assert param_of("sampling.top_p") == "top_p"


def answer_of(**options: Any) -> ResponseAnswer:
    values: dict[str, Any] = {"echoed": {}, "logprobs": False}
    return ResponseAnswer(
        ResponseOptions(
            request_id="r1", model="tiny", token_bytes=ByteTokenizer().token_bytes, created_at=5, **values | options
        )
    )


def parsed_events(data: bytes) -> list[dict[str, Any]]:
    """The events' data. Their names and numbers are checked."""
    events = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, text = block.partition("\n")
        event = json.loads(text.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def tool_responses() -> list[pb.GenerateResponse]:
    """A text, then two calls, as a parser tells of them."""
    parsed = [
        {"content": "Let me see."},
        {"tool_calls": [{"index": 0, "id": "c1", "name": "add", "arguments_json": '{"x"'}]},
        {"tool_calls": [{"index": 0, "arguments_json": ":1}"}]},
        {"tool_calls": [{"index": 1, "id": "c2", "name": "sub", "arguments_json": "{}"}]},
    ]
    responses = [pb.GenerateResponse(deltas=[pb.SampleDelta(text="raw", parsed=entry)]) for entry in parsed]
    responses[-1].deltas[0].finish_reason = pb.FINISH_REASON_TOOL_CALLS
    return [pb.GenerateResponse(), *responses, pb.GenerateResponse(usage={"prompt_token_count": 3})]


CALLS = [
    ("message", "Let me see."),
    ("function_call", ("c1", "add", '{"x":1}')),
    ("function_call", ("c2", "sub", "{}")),
]


def outline(output: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [
        (item["type"], item["content"][0]["text"])
        if item["type"] == "message"
        else (item["type"], (item["call_id"], item["name"], item["arguments"]))
        for item in output
    ]


def test_calls_are_items_of_their_own() -> None:
    answer = answer_of()
    data = b"".join(answer.events(0, response) for response in tool_responses()) + answer.last_events()
    events = parsed_events(data)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert outline([event["item"] for event in events if event["type"].endswith("item.done")]) == CALLS
    assert outline(events[-1]["response"]["output"]) == CALLS
    assert {item["status"] for item in events[-1]["response"]["output"]} == {"completed"}
    whole = pb.GenerateResponse()
    for response in tool_responses():
        for delta in response.deltas:
            whole.deltas.append(delta)
    assert json.loads(answer_of().whole([whole]))["output"] == events[-1]["response"]["output"]


def test_a_length_is_incomplete() -> None:
    answer = answer_of()
    delta = pb.SampleDelta(text="ab", finish_reason=pb.FINISH_REASON_LENGTH)
    data = answer.events(0, pb.GenerateResponse(deltas=[delta])) + answer.last_events()
    *_, last = parsed_events(data)
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_an_answer_without_text_is_an_empty_message() -> None:
    response = pb.GenerateResponse(deltas=[pb.SampleDelta(finish_reason=pb.FINISH_REASON_STOP)])
    (item,) = json.loads(answer_of().whole([response]))["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


class Served:
    """The application over a fake engine, and OpenAI's client of it."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        routes = Routes(make_backend(self.engine), metrics=self.engine.metrics, max_request_bytes=100_000)
        self.http = httpx.AsyncClient(base_url="http://local", transport=httpx.ASGITransport(make_app(routes)))
        self.sdk = openai.AsyncOpenAI(base_url="http://local/v1", api_key="none", max_retries=0, http_client=self.http)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    await served.http.aclose()


async def test_a_whole_response(served: Served) -> None:
    served.engine.cached_tokens = 2
    body = {"model": "tiny-alias", "input": "Hi", "metadata": {"a": "b"}, "instructions": "x", "max_output_tokens": 50}
    response = await served.http.post("/v1/responses", json=body)
    answer = response.json()
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "tiny-alias")
    assert (answer["metadata"], answer["instructions"], answer["max_output_tokens"]) == ({"a": "b"}, "x", 50)
    assert (answer["store"], answer["error"], answer["tool_choice"]) == (False, None, "auto")
    (item,) = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}]
    assert answer["usage"] == {
        "input_tokens": len("system: x\nuser: Hi\nassistant:"),
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("system: x\nuser: Hi\nassistant:") + 6,
    }


async def test_the_openai_sdk(served: Served) -> None:
    response = await served.sdk.responses.create(
        model="tiny", input="Hi", include=["message.output_text.logprobs"], top_logprobs=1
    )
    assert response.output_text == "Paris."
    assert response.usage is not None
    assert response.usage.output_tokens == 6
    message: Any = response.output[0]
    first = message.content[0].logprobs[0]
    assert (first.token, first.logprob, first.bytes, first.top_logprobs[0].token) == ("P", -0.25, [80], "P")

    stream = await served.sdk.responses.create(model="tiny", input="Hi", stream=True)
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Paris."
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")

    async with served.sdk.responses.stream(model="tiny", input="Hi") as helper:
        async for _ in helper:
            pass
        final = await helper.get_final_response()
    assert final.output_text == "Paris."
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        await served.sdk.responses.create(model="tiny", input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError) as caught:
        await served.sdk.responses.create(model="tiny", input="Hi", max_output_tokens=10_000)
    assert caught.value.param == "max_output_tokens"
    tool: Any = {"type": "function", "name": "no good name", "parameters": {}, "strict": False}
    with pytest.raises(openai.BadRequestError) as caught:
        await served.sdk.responses.create(model="tiny", input="Hi", tools=[tool])
    assert caught.value.param == "tools[0].name"


async def test_a_length_in_the_sdk(served: Served) -> None:
    served.engine.finish_reason = FinishReason.LENGTH
    response = await served.sdk.responses.create(model="tiny", input="Hi", max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "Par")


async def test_failures_are_statuses_before_the_first_token_and_events_behind_it(served: Served) -> None:
    served.engine.failure = GenerationError("its logits were not finite")
    with pytest.raises(openai.InternalServerError, match="its logits were not finite"):
        await served.sdk.responses.create(model="tiny", input="Hi", stream=True)
    served.engine.fail_at = 2
    text = (await served.http.post("/v1/responses", json={"input": "Hi", "stream": True})).text
    *_, failed, error = parsed_events(text.encode())
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "its logits were not finite"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Pa"
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert (error["type"], error["code"]) == ("error", "generation_failed")
    stream = await served.sdk.responses.create(model="tiny", input="Hi", stream=True)
    with pytest.raises(openai.APIError, match="its logits were not finite"):
        async for _ in stream:
            pass
