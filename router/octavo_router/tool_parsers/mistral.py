"""Calls as Mistral's models write them: a mark and a JSON list of calls, or a mark, a name and an object for each.

`[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, or from the 11th version of their tokenizers on
`[TOOL_CALLS]f[ARGS]{...}`.
The formats are Mistral's, github.com/mistralai/mistral-common.
"""

from __future__ import annotations

import re
from collections.abc import Set

from octavo_router.tool_parsers.json_value import JsonValue
from octavo_router.tool_parsers.parser import ToolParser

MARK, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_BEHIND_NAME = re.compile(r"\s*+(?:\[CALL_ID\]\s*+[A-Za-z0-9_-]*+\s*+)?+(?:\[ARGS\]\s*+)?+(?=\{)")
# Of a call's name and all that stands before its arguments. More is content: it would be read again with every piece.
_MAX_HEAD_LENGTH = 1024


class MistralParser(ToolParser):
    """Both formats, whichever the model writes."""

    marks = (MARK, ARGUMENTS, CALL_ID)

    def __init__(self, tool_names: Set[str] = frozenset()) -> None:
        super().__init__(tool_names)
        self._arguments = JsonValue()

    def _start(self) -> bool:
        return self._content_until(MARK, self._marked)

    def _marked(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[0] == "[":
            self._begin_list(self._start, self._start)
        elif self._text[0] == "{":
            self._begin_json(self._start, self._start, is_unmarked=False)
        else:
            self._state = self._named
        return True

    def _named(self) -> bool:
        """A name and what stands between it and its arguments, all of it at once: it is short."""
        head = self._text[:_MAX_HEAD_LENGTH]
        name = _NAME.match(head)
        if name is None:
            self._abandon_call(self._start)
            return True
        behind = _BEHIND_NAME.match(head, name.end())
        if behind is not None:
            self._text = self._text[behind.end() :]
            self._begin_call(name.group())
            self._arguments = JsonValue()
            self._state = self._named_arguments
            return True
        if len(head) < _MAX_HEAD_LENGTH and _may_come(head[name.end() :]):
            return False
        self._pending += name.group()
        self._text = self._text[name.end() :]
        self._abandon_call(self._start)
        return True

    def _named_arguments(self) -> bool:
        end = self._arguments.feed(self._text, 0)
        self._add_arguments(self._text[:end])
        self._text = self._text[end:]
        if not self._arguments.is_done:
            return False
        self._follows_call = True
        self._state = self._start
        return True

    def _is_leftover(self, rest: str) -> bool:
        return rest in ("", ",")


def _may_come(text: str) -> bool:
    """Whether text may still become what stands between a name and its arguments."""
    text = text.lstrip()
    if CALL_ID.startswith(text) or ARGUMENTS.startswith(text):
        return True
    if text.startswith(CALL_ID):
        text = text[len(CALL_ID) :].lstrip()
        text = re.sub(r"^[A-Za-z0-9_-]*", "", text).lstrip()
    if text.startswith(ARGUMENTS):
        text = text[len(ARGUMENTS) :].lstrip()
    return ARGUMENTS.startswith(text)
