"""Calls as Hermes and Qwen write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them.

The format is Nous Research's, github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

from octavo_router.tool_parsers.json_call import WHITE_SPACE
from octavo_router.tool_parsers.parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """`<tool_call>` and a JSON object, or a list of them as SmolLM2 has it. A missing `</tool_call>` spoils no call."""

    marks = (OPEN, CLOSE)

    def _start(self) -> bool:
        return self._content_until(OPEN, self._opened)

    def _opened(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[0] == "[":
            self._begin_list(self._behind_call, self._start)
        else:
            self._begin_json(self._behind_call, self._start, is_unmarked=False)
        return True

    def _behind_call(self) -> bool:
        # Small models close one brace too many.
        if not self._skip(WHITE_SPACE + "}"):
            return False
        if self._text.startswith(CLOSE):
            self._text = self._text[len(CLOSE) :]
            self._pending = ""
        elif CLOSE.startswith(self._text):
            return False
        self._abandon_call(self._start)
        return True

    def _is_leftover(self, rest: str) -> bool:
        return CLOSE.startswith(rest.lstrip(WHITE_SPACE + "},"))
