"""Which tools and choices are taken, and what templates get of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format

from octavo.errors import InvalidRequestError
from octavo.v1 import inference_pb2 as pb
from octavo_router.tool_definitions import ToolChoice, choice_of, templates_tools, tools_of


def chat_of(**fields: Any) -> pb.ChatPrompt:
    return json_format.ParseDict(fields, pb.ChatPrompt())


def test_templates_get_tools_as_transformers_gives_them() -> None:
    schema = '{"type": "object", "required": ["b", "a"], "properties": {"b": {"const": 12345678901234567890}, "a": {}}}'
    chat = chat_of(tools=[{"name": "f", "description": "<é>", "parametersJson": schema, "strict": True}, {"name": "g"}])
    assert json.dumps(templates_tools(chat), ensure_ascii=False) == (
        '[{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": ' + schema + "}}, "
        '{"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}]'
    )
    assert templates_tools(chat_of()) is None


@pytest.mark.parametrize(
    ("tools", "field", "message"),
    [
        ([{"name": ""}], "chat.tools[0].name", "has the name ''; it must be letters"),
        ([{"name": "get weather"}], "chat.tools[0].name", "'get weather'"),
        ([{"name": "x" * 129}], "chat.tools[0].name", "at most 128"),
        ([{"name": "f"}, {"name": "f"}], "chat.tools[1].name", "'f' twice"),
        ([{"name": f"f{i}"} for i in range(129)], "chat.tools", "129 tools; at most 128"),
        ([{"name": "f", "parametersJson": "[]"}], "chat.tools[0].parameters_json", "must be a JSON schema, an object"),
        ([{"name": "f", "parametersJson": "{"}], "chat.tools[0].parameters_json", "'{'"),
        ([{"name": "f", "parametersJson": '{"a": NaN}'}], "chat.tools[0].parameters_json", "NaN"),
        ([{"name": "f", "parametersJson": '{"title": "\\ud800"}'}], "chat.tools[0].parameters_json", "ud800"),
        ([{"name": "f", "parametersJson": "[" * 100_000}], "chat.tools[0].parameters_json", "..."),
    ],
)
def test_tools_that_are_none(tools: list[dict[str, Any]], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tools_of(chat_of(tools=tools))
    assert caught.value.field == field
    assert message in caught.value.message


TOOLS = [{"name": "f"}, {"name": "g"}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ToolChoice(allows=False)),
        ({"tools": TOOLS}, ToolChoice(allows=True)),
        ({"tools": TOOLS, "parallelToolCalls": False}, ToolChoice(allows=True, allows_several=False)),
        ({"tools": TOOLS, "toolChoice": {"mode": "TOOL_CHOICE_MODE_AUTO"}}, ToolChoice(allows=True)),
        ({"toolChoice": {"mode": "TOOL_CHOICE_MODE_AUTO"}}, ToolChoice(allows=False)),
        ({"tools": TOOLS, "toolChoice": {"mode": "TOOL_CHOICE_MODE_NONE"}}, ToolChoice(allows=False)),
        (
            {"tools": TOOLS, "toolChoice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"}},
            ToolChoice(allows=True, is_required=True),
        ),
        (
            {"tools": TOOLS, "toolChoice": {"mode": "TOOL_CHOICE_MODE_NAMED", "name": "g"}},
            ToolChoice(allows=True, is_required=True, name="g", allows_several=False),
        ),
    ],
)
def test_choices(fields: dict[str, Any], expected: ToolChoice) -> None:
    assert choice_of(chat_of(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"toolChoice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"}}, "chat.tool_choice", "there are no tools"),
        ({"toolChoice": {"mode": "TOOL_CHOICE_MODE_NAMED", "name": "f"}}, "chat.tool_choice.name", "none of the tools"),
        (
            {"tools": TOOLS, "toolChoice": {"mode": "TOOL_CHOICE_MODE_NAMED"}},
            "chat.tool_choice.name",
            "names '', which is none of the tools",
        ),
        (
            {"tools": TOOLS, "toolChoice": {"mode": "TOOL_CHOICE_MODE_AUTO", "name": "f"}},
            "chat.tool_choice.name",
            "leave the name out",
        ),
        ({"tools": TOOLS, "toolChoice": {"mode": 9}}, "chat.tool_choice.mode", "mode 9"),
    ],
)
def test_choices_that_are_none(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        choice_of(chat_of(**fields))
    assert caught.value.field == field
    assert message in caught.value.message
