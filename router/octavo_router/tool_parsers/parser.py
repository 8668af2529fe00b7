"""What every tool parser is: text in, content and calls out, while the text arrives.

A parser reads one sample's text and is told when it ends. What it gives depends on the text alone, never on the pieces
in which it came: whoever gives a new parser the same beginning of a text has it in the same state.

Text that turns out to be no call is content, to the last character. White space before a call, or between
two calls, belongs to neither. A call that has begun stays one: where the model goes wrong inside its arguments, or is
cut off, they end as the model left them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import ClassVar

from octavo_router.tool_parsers.json_call import WHITE_SPACE, JsonCall, Status

# Characters that are read at once: each step copies what is behind it, which must not be all of a long text.
_CHUNK_LENGTH = 4096


@dataclass(slots=True)
class CallPiece:
    """What one call gained. index: which call of the sample, from 0; name: set in its first piece only; arguments: new
    characters of them, which are JSON.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What new text turned out to hold."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class ToolParser(ABC):
    """Base of the families' parsers. Not for use by two threads at once.

    marks: the texts that mark calls. Where the tokenizer has them as special tokens, the text must have them in it.
    """

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tool_names: Set[str] = frozenset()) -> None:
        """tool_names: names of the request's tools. Only formats without marks need them: there a name that is no
        tool's is no call. A marked call is one whatever its name, so that the caller can tell the model.
        """
        self.num_calls = 0
        self._tool_names = tool_names
        self._text = ""  # not read yet
        self._pending = ""  # read, and content if no call comes of it
        self._follows_call = False
        self._has_content = False
        self._state: Callable[[], bool] = self._start
        self._said: list[str] = []  # content that nobody has taken yet
        self._pieces: list[CallPiece] = []
        self._json_call = JsonCall()

    def feed(self, text: str) -> Parsed:
        """Takes the next text. What cannot be told from the beginning of a call yet is held back."""
        for start in range(0, len(text), _CHUNK_LENGTH):
            self._text += text[start : start + _CHUNK_LENGTH]
            while self._text and self._state():
                pass
        return self._take()

    def finish(self) -> Parsed:
        """The text has ended: gives what was held back."""
        if self._state == self._json_object:
            self._json_call.finish()
            self._say_arguments()
        rest = self._unsaid()
        if not (self._follows_call and self._is_leftover(rest.strip(WHITE_SPACE))):
            self._say(rest)
        self._text = self._pending = ""
        return self._take()

    @abstractmethod
    def _start(self) -> bool:
        """The state at the text's beginning.

        A state reads from the front of `_text`, may change `_state`, and returns whether it could do anything. It must
        decide only on what is certain whatever comes next.
        """

    def _unsaid(self) -> str:
        """All text that was read or not and became neither content nor a call."""
        raw = self._json_call.raw if self._state == self._json_object and self._json_call.name is None else ""
        return self._pending + raw + self._text

    @abstractmethod
    def _is_leftover(self, rest: str) -> bool:
        """Whether rest, with which the whole text ends right behind a call, is what there is of the format's markup."""

    def _content_until(self, mark: str, then: Callable[[], bool]) -> bool:
        """A state: content up to a mark, which stays pending, as does the white space before it."""
        text = self._text
        at = text.find(mark)
        if at >= 0:
            self._say_before_space(text[:at])
            self._hold(mark)
            self._text = text[at + len(mark) :]
            self._state = then
            return True
        num_held = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
        end = len(text) - num_held
        self._say_before_space(text[:end])
        self._text = text[end:]
        return False

    def _say_before_space(self, text: str) -> None:
        """Text is content, but for the white space at its end, which is pending."""
        content = text.rstrip(WHITE_SPACE)
        if content:
            self._hold(content)
            self._say(self._pending)
            self._pending = ""
        self._hold(text[len(content) :])

    def _begin_json(self, after: Callable[[], bool], otherwise: Callable[[], bool], *, is_unmarked: bool) -> None:
        """Goes on with a call that is a JSON object. after: the state behind it; otherwise: the state where it turns
        out to be none, with what was pending made content.
        """
        self._json_call = JsonCall(is_tool=self._tool_names.__contains__ if is_unmarked else None)
        self._after_json, self._otherwise = after, otherwise
        self._state = self._json_object

    def _json_object(self) -> bool:
        call = self._json_call
        was_begun = call.name is not None
        num_read = call.feed(self._text)
        self._text = self._text[num_read:]
        if call.name is not None and not was_begun:
            self._begin_call(call.name)
        self._say_arguments()
        if call.status is Status.READING:
            return False
        if call.name is not None:
            # Where it is broken, its arguments are whole: what is wrong stands behind them.
            self._follows_call = True
            self._state = self._after_json
        else:
            self._pending += call.raw
            self._abandon_call(self._otherwise)
        return True

    def _begin_list(self, after: Callable[[], bool], otherwise: Callable[[], bool]) -> None:
        """Goes on with a JSON list of calls, whose bracket is at the front. after and otherwise as in `_begin_json`."""
        self._pending += "["
        self._text = self._text[1:]
        self._after_list, self._otherwise_list = after, otherwise
        self._state = self._list_item

    def _list_item(self) -> bool:
        self._begin_json(self._behind_item, self._otherwise_list, is_unmarked=False)
        return True

    def _behind_item(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[0] == ",":
            self._pending += ","
            self._text = self._text[1:]
            self._state = self._list_item
            return True
        if self._text[0] == "]":
            self._text = self._text[1:]
        else:
            # The list was not closed; the space is no part of it.
            self._text = self._pending + self._text
        self._pending = ""
        self._state = self._after_list
        return True

    def _begin_call(self, name: str) -> None:
        self._pending = ""
        self._pieces.append(CallPiece(self.num_calls, name))
        self.num_calls += 1

    def _say_arguments(self) -> None:
        self._add_arguments(self._json_call.take_arguments())

    def _add_arguments(self, arguments: str) -> None:
        """More characters of the last call's arguments."""
        if not arguments:
            return
        if not self._pieces or self._pieces[-1].index != self.num_calls - 1:
            self._pieces.append(CallPiece(self.num_calls - 1))
        self._pieces[-1].arguments += arguments

    def _abandon_call(self, state: Callable[[], bool]) -> None:
        """What was pending is content."""
        pending, self._pending = self._pending, ""
        self._say(pending)
        self._state = state

    def _say(self, content: str) -> None:
        if self._follows_call and not self._has_content:
            content = content.lstrip(WHITE_SPACE)
        if content:
            self._follows_call = False
            self._has_content = True
            self._said.append(content)

    def _skip_space(self) -> bool:
        """Makes white space at the front pending. Returns whether something stands behind it."""
        return self._skip(WHITE_SPACE)

    def _skip(self, characters: str) -> bool:
        rest = self._text.lstrip(characters)
        self._hold(self._text[: len(self._text) - len(rest)])
        self._text = rest
        return bool(rest)

    def _hold(self, text: str) -> None:
        """Text is pending. CPython appends in place to a text that only one local variable has, so that much of it
        in small pieces is not copied with each.
        """
        pending, self._pending = self._pending, ""
        pending += text
        self._pending = pending

    def _take(self) -> Parsed:
        parsed = Parsed("".join(self._said), self._pieces)
        self._said, self._pieces = [], []
        return parsed
