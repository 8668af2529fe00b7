"""The tools of a chat prompt and how free the model is to call them, checked against the contract.

What the template makes of the tools is its own matter, and how calls are written `tool_calls.py`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.errors import InvalidRequestError
from octavo.v1 import inference_pb2 as pb

MAX_TOOLS = 128
MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One tool. parameters: the JSON schema of its arguments, its keys in the order given; without any it takes none.
    description: None where it has none. strict: calls of it match the schema even where none is required.
    """

    name: str
    parameters: dict[str, Any]
    description: str | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """The form in which templates take a tool, as transformers makes it of a function."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and which tool is called. allows: a call is possible; is_required: there is at least one; name: of the
    only tool that may be called; allows_several: there may be more than one call.
    """

    allows: bool
    is_required: bool = False
    name: str = ""
    allows_several: bool = True


def tools_of(chat: pb.ChatPrompt) -> list[ToolDefinition]:
    """The tools, in order. Raises InvalidRequestError for a name that cannot be one or is there twice, and for
    parameters that are no JSON schema.
    """
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools has {len(chat.tools)} tools; at most {MAX_TOOLS} are possible", field="chat.tools"
        )
    names: set[str] = set()
    for index, tool in enumerate(chat.tools):
        if not _NAME.fullmatch(tool.name) or len(tool.name) > MAX_NAME_LENGTH:
            raise InvalidRequestError(
                f"tools[{index}] has the name {tool.name[:40]!r}; it must be letters, digits and _ . : / -, at most "
                f"{MAX_NAME_LENGTH} of them",
                field=f"chat.tools[{index}].name",
            )
        if tool.name in names:
            raise InvalidRequestError(
                f"tools has the name {tool.name!r} twice; give each tool a name of its own",
                field=f"chat.tools[{index}].name",
            )
        names.add(tool.name)
    return [
        ToolDefinition(tool.name, _parameters(index, tool.parameters_json), tool.description or None, tool.strict)
        for index, tool in enumerate(chat.tools)
    ]


def choice_of(chat: pb.ChatPrompt) -> ToolChoice:
    """Whether and which of the tools is called. Raises InvalidRequestError for a choice that the tools do not offer."""
    mode, name = chat.tool_choice.mode, chat.tool_choice.name
    if mode not in pb.ToolChoiceMode.values():
        raise InvalidRequestError(
            f"tool_choice has mode {mode}; it must be one of the values of ToolChoiceMode",
            field="chat.tool_choice.mode",
        )
    if name and mode != pb.TOOL_CHOICE_MODE_NAMED:
        raise InvalidRequestError(
            f"tool_choice names {name[:40]!r}, but its mode is not TOOL_CHOICE_MODE_NAMED; leave the name out",
            field="chat.tool_choice.name",
        )
    if mode == pb.TOOL_CHOICE_MODE_NONE:
        return ToolChoice(allows=False)
    if mode == pb.TOOL_CHOICE_MODE_NAMED:
        if name not in {tool.name for tool in chat.tools}:
            raise InvalidRequestError(
                f"tool_choice names {name[:40]!r}, which is none of the tools", field="chat.tool_choice.name"
            )
        return ToolChoice(allows=True, is_required=True, name=name, allows_several=False)
    if mode == pb.TOOL_CHOICE_MODE_REQUIRED and not chat.tools:
        raise InvalidRequestError(
            "tool_choice is required, but there are no tools; give tools", field="chat.tool_choice"
        )
    return ToolChoice(
        allows=bool(chat.tools),
        is_required=mode == pb.TOOL_CHOICE_MODE_REQUIRED,
        allows_several=chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"),
    )


def templates_tools(chat: pb.ChatPrompt) -> Sequence[dict[str, Any]] | None:
    """The tools as templates take them; None for none. Raises as `tools_of` does."""
    return [tool.for_template() for tool in tools_of(chat)] or None


def _parameters(index: int, text: str) -> dict[str, Any]:
    if not text:
        return dict(_NO_PARAMETERS)
    try:
        parameters = json.loads(text, parse_constant=_refuse_constant)
        # Escapes may spell halves of characters, which no prompt can hold.
        json.dumps(parameters, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise InvalidRequestError(
            f"tools[{index}] has parameters {shown!r}; they must be a JSON schema, an object",
            field=f"chat.tools[{index}].parameters_json",
        )
    return parameters


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
