"""Tools in OpenAI's bodies: tools, tool_choice and parallel_tool_calls become the contract's.

Schemas keep the order of their keys. Whether names and schemas are good is not looked at here: `tool_definitions.py`
does that for every front end.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field, WithJsonSchema

from octavo.errors import InvalidRequestError
from octavo.v1 import inference_pb2 as pb
from octavo_router.openai_body import Body, shown

_MODES = {
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": list(_MODES)},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
        {"type": "null"},
    ]
}
# Fields of the contract within a tool, a choice or a call, and their names in OpenAI's API.
_PARAMS = (
    (re.compile(r"^(tools\[\d+\])\.(name|description|strict)$"), r"\1.function.\2"),
    (re.compile(r"^(tools\[\d+\])\.parameters_json$"), r"\1.function.parameters"),
    (re.compile(r"^tool_choice\.mode$"), "tool_choice"),
    (re.compile(r"^tool_choice\.name$"), "tool_choice.function.name"),
)


def _checked_choice(value: Any) -> Any:
    """none, auto, required, or the name of a function; the name as {"name": ...}."""
    if value is None or (isinstance(value, str) and value in _MODES):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and value.keys() == {"type", "function"}:
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return function
    if isinstance(value, dict) and value.get("type") not in (None, "function"):
        raise ValueError(f"a choice of type {shown(value['type'])} is not offered by this server")
    raise ValueError('it must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}')


def _checked_kind(value: Any) -> Any:
    if value != "function":
        raise ValueError("tools of this type are not offered by this server; only functions are")
    return value


Choice = Annotated[Any, BeforeValidator(_checked_choice), WithJsonSchema(_CHOICE_SCHEMA)]


class FunctionDefinition(Body):
    """A function that may be called. parameters: the JSON schema of its arguments; without any it takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A tool. Functions are the only ones there are."""

    type: Annotated[Literal["function"], BeforeValidator(_checked_kind)]
    function: FunctionDefinition


Tools = Annotated[list[FunctionTool], Field(fail_fast=True)]


class ToolFields(Protocol):
    """A body with tools."""

    tools: list[FunctionTool] | None
    tool_choice: Any
    parallel_tool_calls: bool | None


def check_no_legacy(functions: Any, function_call: Any) -> None:
    """Raises InvalidRequestError for what tools took the place of, unless it asks for nothing."""
    if functions:
        raise InvalidRequestError("functions is not offered by this server; use tools instead", field="functions")
    if function_call not in (None, "none", "auto"):
        raise InvalidRequestError(
            "function_call is not offered by this server; use tool_choice instead", field="function_call"
        )


def add_choice(prompt: pb.ChatPrompt, body: ToolFields) -> None:
    """Puts a body's tools, and whether and which is called, into a conversation."""
    add_tools(prompt, body.tools)
    choice = body.tool_choice
    if isinstance(choice, dict):
        prompt.tool_choice.mode = pb.TOOL_CHOICE_MODE_NAMED
        prompt.tool_choice.name = choice["name"]
    elif choice is not None:
        prompt.tool_choice.mode = _MODES[choice]
    if body.parallel_tool_calls is not None:
        prompt.parallel_tool_calls = body.parallel_tool_calls


def add_tools(prompt: pb.ChatPrompt, tools: list[FunctionTool] | None) -> None:
    """Puts tools into a conversation."""
    for tool in tools or ():
        function = tool.function
        prompt.tools.add(
            name=function.name,
            description=function.description or "",
            parameters_json="" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False),
            strict=bool(function.strict),
        )


def tool_param_of(name: str) -> str:
    """The name in OpenAI's API of a field within a conversation's tools; other names stay."""
    for pattern, param in _PARAMS:
        name = pattern.sub(param, name)
    return name
