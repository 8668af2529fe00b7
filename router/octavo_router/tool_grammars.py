"""Grammars of answers that call tools: the markup of the model's family around arguments that match the tool's schema.

In Lark's notation as llguidance has it (github.com/guidance-ai/llguidance, docs/syntax.md): `%json` takes a JSON
schema, `<[7]>` is the special token 7. Between the values stand the spaces that chat templates write, so that an answer
is like the calls that the model has seen, and never endless white space.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo_router.tool_definitions import ToolDefinition
from octavo_router.tool_parsers import hermes, llama3_json, mistral

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords with which a schema says more of its properties than their names.
_OPENING_KEYS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties", "$ref"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"}
)

_TEXT = r"TEXT: /(.|\n)*/"


def call_grammar(
    family: str,
    tools: Sequence[ToolDefinition],
    *,
    is_required: bool,
    has_several: bool,
    special_ids: Mapping[str, int],
    template: str,
) -> str:
    """The grammar of an answer whose calls are calls of these tools with arguments that match their schemas.

    family: of the parser that reads it, a name in PARSERS that has such a grammar; is_required: the answer is calls and
    nothing else, where otherwise any text may stand around them; has_several: more than one call is possible, where the
    family has that; special_ids: ids of the marks that are special tokens; template: source of the chat template.
    """

    def mark(text: str) -> str:
        return f"<[{special_ids[text]}]>" if text in special_ids else _quoted(text)

    rules = [f"a{index}: %json {json.dumps(_schema(tool), ensure_ascii=False)}" for index, tool in enumerate(tools)]
    if family == "hermes":
        calls = 'call ("\\n" call)*' if has_several else "call"
        opening, body = hermes.OPEN, f'"\\n" object "\\n" {mark(hermes.CLOSE)}'
        rules += _objects(tools, "arguments")
    elif family == "mistral" and mistral.ARGUMENTS in template:
        calls, opening = "call+" if has_several else "call", mistral.MARK
        named = [f"{_quoted(tool.name)} {mark(mistral.ARGUMENTS)} a{index}" for index, tool in enumerate(tools)]
        body = f"({' | '.join(named)})"
    elif family == "mistral":
        calls, opening = "call", mistral.MARK
        items = 'object (", " object)*' if has_several else "object"
        body = f'" "? "[" {items} "]"'
        rules += _objects(tools, "arguments")
    else:
        assert family == "llama3_json", family
        return "\n".join([*_llama_start(is_required, special_ids), *rules, *_objects(tools, "parameters"), ""])
    if is_required:
        return "\n".join([f"start: {calls}", f"call: {mark(opening)} {body}", *rules, ""])
    # A mark that is text ends the text before it where it first appears; a special token is no text.
    begun = "begun" if opening in special_ids else "begun[lazy]"
    free = [f"start: call{'*' if has_several else '?'} TEXT", f"call: begun {body}", f"{begun}: TEXT {mark(opening)}"]
    return "\n".join([*free, _TEXT, *rules, ""])


def _llama_start(is_required: bool, special_ids: Mapping[str, int]) -> list[str]:
    """Llama's models write one call an answer; one that begins with a brace is that call."""
    if is_required:
        return ["start: object"]
    tag = special_ids.get(llama3_json.PYTHON_TAG)
    tagged = "" if tag is None else f" | TEXT <[{tag}]> object"
    return [f"start: object | OTHER{tagged}", r"OTHER: /[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/", *([_TEXT] if tagged else [])]


def _objects(tools: Sequence[ToolDefinition], key: str) -> list[str]:
    """The rule `object`: a call as a JSON object."""
    calls = []
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        calls.append(f'{_quoted(head)} a{index} "}}"')
    return [f"object: {' | '.join(calls)}"]


def _schema(tool: ToolDefinition) -> dict[str, Any]:
    """The schema of a tool's arguments: an object whether it says so or not, and of the properties that it names alone
    unless it says something else. (JSON schema admits any others by default, and a small model goes on inventing them.)
    """
    schema = {"type": "object", "x-guidance": _SPACING} | tool.parameters
    if "properties" in schema and not schema.keys() & _OPENING_KEYS:
        schema["additionalProperties"] = False
    return schema


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
