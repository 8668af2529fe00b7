"""Finds where JSON values end in text that arrives in pieces.

Looks at strings, escapes and brackets alone. Whether what stands between the brackets is JSON is not checked: a model's
arguments reach the caller as the model wrote them.
"""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^,}\]\s]*")


class JsonValue:
    """One value. Feed it text from the value's first character on, which must not be white space.

    opening: that first character, empty before it came. is_done: the value's last character has come; of a number or a
    word that is known with the character behind it.
    """

    __slots__ = ("_depth", "_in_string", "_is_escaped", "is_done", "opening")

    def __init__(self) -> None:
        self.opening = ""
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int) -> int:
        """The end of what belongs to the value in text, from start on."""
        if not self.opening and start < len(text):
            self.opening = text[start]
        if self.opening not in ("{", "[", '"'):
            return self._scalar_end(text, start)
        end = start
        while end < len(text) and not self.is_done:
            end = self._string_end(text, end) if self._in_string else self._outside_end(text, end)
        return end

    def _scalar_end(self, text: str, start: int) -> int:
        match = _SCALAR.match(text, start)
        assert match is not None
        self.is_done = match.end() < len(text)
        return match.end()

    def _string_end(self, text: str, start: int) -> int:
        """Past the string that is open, or past what there is of it."""
        if self._is_escaped:
            self._is_escaped = False
            return start + 1
        match = _IN_STRING.match(text, start)
        assert match is not None
        end = match.end()
        if end == len(text):
            return end
        if text[end] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_done = self._depth == 0
        return end + 1

    def _outside_end(self, text: str, start: int) -> int:
        """Past the next quote or bracket."""
        match = _OUTSIDE.match(text, start)
        assert match is not None
        end = match.end()
        if end == len(text):
            return end
        if text[end] == '"':
            self._in_string = True
        elif text[end] in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.is_done = self._depth == 0
        return end + 1
