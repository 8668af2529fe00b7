"""Calls as Llama 4 and others write them: a Python list, `[f(a=1), g(b="x")]`, that is the whole answer.

Python values become JSON only when they are whole, so the arguments of a call come in one piece, at its end. The format
is Meta's, llama.com/docs/model-cards-and-prompt-formats/llama4.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Set
from typing import Any

from octavo_router.tool_parsers.parser import ToolParser

START, END = "<|python_start|>", "<|python_end|>"
# Most characters of a call outside its strings: Python takes a second for a few hundred thousand of them. A call with
# more is content.
MAX_SOURCE_LENGTH = 64 << 10
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_OUTSIDE = re.compile(r"[^'\"()\[\]{}]*")


class PythonicParser(ToolParser):
    """A list at the answer's beginning, whose items call tools with keyword arguments. Other names are no calls."""

    marks = (START, END)

    def __init__(self, tool_names: Set[str] = frozenset()) -> None:
        super().__init__(tool_names)
        self._span = _CallSpan()
        self._call_parts: list[str] = []
        self._name = ""

    def _start(self) -> bool:
        if not self._skip_space():
            return False
        if self._text.startswith("["):
            self._pending += "["
            self._text = self._text[1:]
            self._state = self._item
        elif self._text.startswith(START):
            self._pending += START
            self._text = self._text[len(START) :]
            self._state = self._opened
        elif START.startswith(self._text):
            return False
        else:
            self._abandon_call(self._content)
        return True

    def _opened(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[0] != "[":
            self._abandon_call(self._content)
            return True
        self._pending += "["
        self._text = self._text[1:]
        self._state = self._item
        return True

    def _content(self) -> bool:
        """No call begins later in an answer."""
        self._say(self._text)
        self._text = ""
        return False

    def _item(self) -> bool:
        if not self._skip_space():
            return False
        name = _NAME.match(self._text)
        if name is not None and name.end() == len(self._text) and self._may_be_tool(name.group()):
            return False
        if name is None or name.group() not in self._tool_names or not self._text.startswith("(", name.end()):
            self._abandon_call(self._content)
            return True
        self._name = name.group()
        self._pending += self._name
        self._text = self._text[name.end() :]
        self._span = _CallSpan()
        self._call_parts = []
        self._state = self._arguments
        return True

    def _may_be_tool(self, beginning: str) -> bool:
        return any(name.startswith(beginning) for name in self._tool_names)

    def _arguments(self) -> bool:
        end = self._span.feed(self._text)
        self._call_parts.append(self._text[:end])
        self._text = self._text[end:]
        is_too_long = self._span.num_outside > MAX_SOURCE_LENGTH
        if not self._span.is_done and not is_too_long:
            return False
        source = "".join(self._call_parts)
        self._call_parts = []
        arguments = None if is_too_long else _json_arguments(source)
        if arguments is None:
            self._pending += source
            self._abandon_call(self._content)
            return True
        self._begin_call(self._name)
        self._add_arguments(arguments)
        self._follows_call = True
        self._state = self._behind_call
        return True

    def _behind_call(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[0] == ",":
            self._pending += ","
            self._text = self._text[1:]
            self._state = self._item
        elif self._text[0] == "]":
            self._pending = ""
            self._text = self._text[1:]
            self._state = self._behind_list
        else:
            self._abandon_call(self._content)
        return True

    def _behind_list(self) -> bool:
        if not self._skip_space():
            return False
        if self._text.startswith(END):
            self._pending = ""
            self._text = self._text[len(END) :]
        elif END.startswith(self._text):
            return False
        self._abandon_call(self._content)
        return True

    def _unsaid(self) -> str:
        return self._pending + "".join(self._call_parts) + self._text

    def _is_leftover(self, rest: str) -> bool:
        return rest == "," or END.startswith(rest)


class _CallSpan:
    """Finds the end of `(...)` in Python source that arrives in pieces, by its quotes and brackets.

    num_outside: characters outside its strings so far, quotes among them.
    """

    __slots__ = ("_depth", "_is_escaped", "_quote", "is_done", "num_outside")

    def __init__(self) -> None:
        self.is_done = False
        self.num_outside = 0
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """The end of what belongs to it in text, which goes on where the last ended."""
        end = 0
        while end < len(text) and not self.is_done:
            if self._is_escaped:
                self._is_escaped = False
                end += 1
                continue
            match = (_IN_STRING[self._quote] if self._quote else _OUTSIDE).match(text, end)
            assert match is not None
            self.num_outside += 0 if self._quote else match.end() - end
            end = match.end()
            if end < len(text):
                self._take(text[end])
                end += 1
        return end

    def _take(self, character: str) -> None:
        self.num_outside += character != "\\"
        if character == "\\":
            self._is_escaped = bool(self._quote)
        elif character == self._quote:
            self._quote = ""
        elif character in "'\"":
            self._quote = character
        else:
            self._depth += 1 if character in "([{" else -1
            self.is_done = self._depth == 0


def _json_arguments(source: str) -> str | None:
    """The keyword arguments of `(a=1, b="x")` as a JSON object; None for what is not that."""
    try:
        with warnings.catch_warnings():
            # Python would warn in the log of what the model wrote, such as "\d".
            warnings.simplefilter("ignore")
            call = ast.parse(f"f{source}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        arguments = {str(keyword.arg): _json_value(ast.literal_eval(keyword.value)) for keyword in call.keywords}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return text


def _json_value(value: Any) -> Any:
    """A literal as JSON has it. Raises TypeError for one that it has not."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("JSON's keys are texts")
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return value
