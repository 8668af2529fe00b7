"""Calls as Llama 3.1 and its successors write them: a JSON object {"name": "f", "parameters": {...}} that is the whole
answer, or stands behind a mark.

The mark is `<|python_tag|>`. Several calls are joined by semicolons.
The format is Meta's, llama.com/docs/model-cards-and-prompt-formats/llama3_1.
"""

from __future__ import annotations

from octavo_router.tool_parsers.parser import ToolParser

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """Without the tag only an object at the answer's beginning may be a call, and is one where it names a tool."""

    marks = (PYTHON_TAG,)

    def _start(self) -> bool:
        if not self._skip_space():
            return False
        if self._text.startswith("{"):
            self._begin_json(self._behind_call, self._content, is_unmarked=True)
        else:
            self._abandon_call(self._content)
        return True

    def _content(self) -> bool:
        return self._content_until(PYTHON_TAG, self._tagged)

    def _tagged(self) -> bool:
        self._begin_json(self._behind_call, self._content, is_unmarked=False)
        return True

    def _behind_call(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[0] != ";":
            self._abandon_call(self._content)
            return True
        self._pending += ";"
        self._text = self._text[1:]
        self._state = self._behind_semicolon
        return True

    def _behind_semicolon(self) -> bool:
        self._begin_json(self._behind_call, self._content, is_unmarked=True)
        return True

    def _is_leftover(self, rest: str) -> bool:
        return rest in ("", ";")
