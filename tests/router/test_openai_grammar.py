"""Structured output in OpenAI's bodies: each way to ask for it, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.errors import InvalidRequestError, UnsupportedError
from octavo.v1 import sampling_pb2
from octavo_router.openai_grammar import grammar_param
from octavo_router.openai_requests import chat_request, completion_requests
from octavo_router.openai_schema import ChatCompletionBody, CompletionBody, parse_body

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = '{"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}'


def completion_body(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "x"} | fields).encode())


def grammar(**fields: Any) -> sampling_pb2.Grammar | None:
    """The grammar of a completion; a chat completion has the same."""
    (request,) = completion_requests(completion_body(**fields), "r")
    body = {"messages": [{"role": "user", "content": "x"}]} | fields
    chat = chat_request(parse_body(ChatCompletionBody, json.dumps(body).encode()), "r")
    assert request.sampling == chat.sampling
    return request.sampling.grammar if request.sampling.HasField("grammar") else None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            {"json_schema": TEXT},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": TEXT}),
        ({"structured_outputs": {"json": '{"a":1}', "disable_any_whitespace": False}}, {"json_schema": '{"a":1}'}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["b", "a"]}}, {"choices": {"choices": ["b", "a"]}}),
        ({"structured_outputs": {"grammar": "start: X"}}, {"lark": "start: X"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, {"json_schema": TEXT}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choices": {"choices": ["a"]}}),
        ({"guided_grammar": "start: X"}, {"lark": "start: X"}),
    ],
)
def test_each_way_to_ask(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert grammar(**fields) == sampling_pb2.Grammar(**expected)


def test_nothing_asked_is_no_grammar() -> None:
    assert grammar() is None
    assert grammar(response_format={"type": "text"}, structured_outputs=None, guided_json=None) is None


@pytest.mark.parametrize(
    ("fields", "message", "field"),
    [
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "response_format and guided_regex are given",
            "guided_regex",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs.json and structured_outputs.regex are given",
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {}}, "structured_outputs is empty; give one of json, regex", "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs is empty", "structured_outputs"),
        ({"structured_outputs": {"yaml": 1}}, "unknown field structured_outputs.yaml", "structured_outputs.yaml"),
        ({"response_format": {"type": "xml"}}, 'response_format.type is "xml"; it must be', "response_format.type"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema is missing; it is required with type json_schema",
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema is missing",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema is given; leave it out with type text",
            "response_format.json_schema",
        ),
        ({"guided_json": [1]}, "guided_json is [1]; it must be a JSON schema: an object, or JSON text", "guided_json"),
        ({"guided_choice": "ab"}, 'guided_choice is "ab"; it must be', "guided_choice"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammar(**fields)
    assert message in caught.value.message
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["structural_tag", "whitespace_pattern", "disable_additional_properties"])
def test_what_vllm_has_and_this_server_lacks_says_so(name: str) -> None:
    with pytest.raises(UnsupportedError, match="is not offered by this server") as caught:
        grammar(structured_outputs={"regex": "a", name: "x"})
    assert caught.value.field == f"structured_outputs.{name}"


def test_a_complaint_names_the_field_that_asked() -> None:
    assert grammar_param(completion_body()) == ""
    assert grammar_param(completion_body(guided_json={})) == "guided_json"
    assert grammar_param(completion_body(structured_outputs={"regex": "a"})) == "structured_outputs"
    assert grammar_param(completion_body(response_format={"type": "json_object"})) == "response_format"
