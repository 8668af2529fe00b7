"""Reads a tool call that a model writes as a JSON object, {"name": "f", "arguments": {...}}, while it arrives.

The arguments are handed on as they come, character for character. What stands around such an object, and what becomes
of one that is no call, is left to the parsers of the families.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable

from octavo_router.tool_parsers.json_value import JsonValue

WHITE_SPACE = " \t\r\n"
_NAME_KEYS = ("name",)
_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")


class Status(enum.Enum):
    """How far the object has come. BROKEN: the next character cannot go on with a call."""

    READING = "reading"
    DONE = "done"
    BROKEN = "broken"


class JsonCall:
    """One object. It is a call as soon as it has a name and its arguments have begun, in either order; without
    arguments it is one at its end.

    name: of a call, None before it is one.
    """

    __slots__ = (
        "_arguments",
        "_call_name",
        "_is_tool",
        "_is_unmarked",
        "_key",
        "_raw",
        "_step",
        "_token",
        "_value",
        "name",
        "status",
    )

    def __init__(self, *, is_tool: Callable[[str], bool] | None = None) -> None:
        """is_tool: given where only the object's content tells a call from any other JSON. Then a call must have a name
        that is_tool knows, and arguments, and no key that calls do not have.
        """
        self.status = Status.READING
        self.name: str | None = None
        self._raw: list[str] = []
        self._is_unmarked = is_tool is not None
        self._is_tool = is_tool or (lambda name: True)
        self._call_name: str | None = None  # the object's, before it is known to be a call
        self._arguments: list[str] | None = None  # of the arguments, what was not taken; None: there are none yet
        self._key = ""
        self._token: list[str] = []  # text of the key or value that is being read
        self._value = JsonValue()
        self._step: Callable[[str, int], int] = self._open

    def feed(self, text: str) -> int:
        """Reads on. Returns how many characters are the object's; fewer than all where it has ended or is broken."""
        position = 0
        while position < len(text) and self.status is Status.READING:
            position = self._step(text, position)
        if self.name is None:
            self._raw.append(text[:position])
        return position

    @property
    def raw(self) -> str:
        """The text read while it was not known to be a call."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """The characters of the arguments that came since the last call of this, once `name` is known."""
        if self.name is None or not self._arguments:
            return ""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def finish(self) -> None:
        """No more text comes. Arguments that were cut off count as they stand."""
        if self.name is not None and self._step == self._plain_arguments:
            self._arguments = [self._take_token()]

    # Each step reads some of text from position on and returns where it stopped, or changes the step or the status.

    def _open(self, text: str, position: int) -> int:
        return self._expect(text, position, {"{": self._first_key})

    def _first_key(self, text: str, position: int) -> int:
        return self._expect(text, position, {'"': self._key_text, "}": self._close}, consume=False)

    def _next_key(self, text: str, position: int) -> int:
        return self._expect(text, position, {'"': self._key_text}, consume=False)

    def _key_text(self, text: str, position: int) -> int:
        end = self._read_value(text, position)
        if self._value.is_done:
            key = _decoded(self._take_token())
            if key is None or (self._is_unmarked and key not in (*_NAME_KEYS, *_ARGUMENTS_KEYS, *_OTHER_KEYS)):
                self.status = Status.BROKEN
            self._key = key or ""
            self._step = self._colon
        return end

    def _colon(self, text: str, position: int) -> int:
        return self._expect(text, position, {":": self._value_start})

    def _value_start(self, text: str, position: int) -> int:
        position = _skip(text, position)
        if position < len(text):
            if text[position] in ",}]:":
                self.status = Status.BROKEN
            elif self._key in _ARGUMENTS_KEYS and self._arguments is None:
                self._step = self._nested_arguments if text[position] in "{[" else self._plain_arguments
                self._begin()
            elif self._key in _NAME_KEYS and self._call_name is None:
                self._step = self._name_value
            else:
                self._step = self._other_value
        return position

    def _name_value(self, text: str, position: int) -> int:
        end = self._read_value(text, position)
        if self._value.is_done:
            name = _decoded(self._take_token())
            self._step = self._comma
            if not name or not self._is_tool(name):
                self.status = Status.BROKEN
            else:
                self._call_name = name
                if self._arguments is not None:
                    self._begin()
        return end

    def _nested_arguments(self, text: str, position: int) -> int:
        end = self._value.feed(text, position)
        self._arguments = self._arguments or []
        self._arguments.append(text[position:end])
        if self._value.is_done:
            self._value = JsonValue()
            self._step = self._comma
        return end

    def _plain_arguments(self, text: str, position: int) -> int:
        """Arguments that are no object. JSON text of one within a string stands for it, and null for none."""
        end = self._read_value(text, position)
        if self._value.is_done:
            token = self._take_token()
            inner = _decoded(token)
            self._arguments = ["{}" if token == "null" else inner if inner is not None and _is_object(inner) else token]
            self._step = self._comma
            self._begin()
        return end

    def _other_value(self, text: str, position: int) -> int:
        end = self._read_value(text, position)
        if self._value.is_done:
            self._take_token()
            self._step = self._comma
        return end

    def _comma(self, text: str, position: int) -> int:
        position = _skip(text, position)
        if position < len(text) and text[position] == "}":
            return self._close(text, position)
        return self._expect(text, position, {",": self._next_key})

    def _close(self, text: str, position: int) -> int:
        if self._call_name is None or (self._arguments is None and self._is_unmarked):
            self.status = Status.BROKEN
            return position
        if self._arguments is None:
            self._arguments = ["{}"]
            self._begin()
        self.status = Status.DONE
        return position + 1

    def _begin(self) -> None:
        """It is a call where its name is known."""
        if self.name is None and self._call_name is not None:
            self.name = self._call_name

    def _read_value(self, text: str, position: int) -> int:
        end = self._value.feed(text, position)
        self._token.append(text[position:end])
        return end

    def _take_token(self) -> str:
        token, self._token, self._value = "".join(self._token), [], JsonValue()
        return token

    def _expect(
        self, text: str, position: int, steps: dict[str, Callable[[str, int], int]], *, consume: bool = True
    ) -> int:
        """Goes to the step of the next character that is not white space. Any other breaks the object."""
        position = _skip(text, position)
        if position == len(text):
            return position
        step = steps.get(text[position])
        if step is None:
            self.status = Status.BROKEN
            return position
        self._step = step
        return position + 1 if consume else position


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in WHITE_SPACE:
        position += 1
    return position


def _decoded(token: str) -> str | None:
    """The text of a JSON string; None for what is none, or spells half a character."""
    try:
        value = json.loads(token, strict=False)
        if not isinstance(value, str):
            return None
        value.encode()
    except (ValueError, RecursionError):
        return None
    return value


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False
