"""The text of one sample while its tokens arrive: what may be sent now, and whether a stop string has appeared.

`TextStream.append` takes a token, `take` gives the text that is safe to send. Joined, what `take` gave is the decoding
of all tokens at once (cut at the stop string), at whatever moments it was called.

Whole characters. Text is released in Unicode scalar values that are complete in UTF-8 and that no later token can
change. What people see as one character but is written with several (a flag, a family joined by U+200D, a letter and
its combining marks) may be split between two releases: joined again, it is the same text.

Stop strings. The text ends where a stop string is first *complete*; of several that the same character completes, the
longest counts. That is a property of the text alone, so it does not matter how the text was cut into tokens. The
longest end of the text that may be the beginning of a stop string is held back.

Special tokens that are left out of the text are still matched by a stop string that spells them, such as "<|im_end|>"
or "<|im_end|>\\n". The spelling stands for the whole token, so that "end" does not match a token that nobody sees. Stop
strings are looked for in the text as it is released, and those that spell special tokens also in the text with these
tokens left in. A special token in the middle of a character stands behind that character.

End-of-sequence tokens, stop token ids and token limits are the engine's.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Self

from octavo.errors import InvalidRequestError
from octavo_router.token_decoder import MARK_FIRST, MARK_LAST
from octavo_router.tokenizer import Tokenizer

_MARKS = re.compile(f"[{MARK_FIRST}-{MARK_LAST}]")


class TextStream:
    """Decodes one sample's tokens. Not for use by two threads at once."""

    __slots__ = (
        "_decoder",
        "_follows_special",
        "_hidden",
        "_include_stop",
        "_is_closed",
        "_marked",
        "_marks",
        "_parts",
        "_plain",
        "_spaces",
        "_tokenizer",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = False,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        shown_special_ids: Set[int] = frozenset(),
    ) -> None:
        """include_stop: the stop string found is part of the text, also where it spells a hidden special token.
        shown_special_ids: special tokens that are in the text even with skip_special_tokens.

        Raises InvalidRequestError for an empty stop string or one with a lone surrogate, which no text contains.
        """
        for text in stop:
            if not text or _MARKS.search(text):
                raise InvalidRequestError(
                    f"stop has {text!r}, which no text can contain; give strings of one or more whole characters",
                    field="stop.stop",
                )
        self._tokenizer = tokenizer
        self._decoder = tokenizer.start_decoder()
        special_ids = tokenizer.special_token_ids
        self._hidden = special_ids - shown_special_ids if skip_special_tokens else frozenset[int]()
        self._spaces = spaces_between_special_tokens and not skip_special_tokens
        self._follows_special = False
        self._include_stop = include_stop
        # Hidden special tokens that a stop string spells, each with the mark that stands for it in text.
        self._marks: dict[int, str] = {}
        self._plain = StopMatcher({text: text for text in stop}) if stop else None
        self._marked: StopMatcher | None = None
        if stop and skip_special_tokens:
            patterns = _marked_stops(tokenizer, stop, self._marks)
            self._marked = StopMatcher(patterns) if patterns else None
        self._parts: list[str] = []  # text that is final and not taken yet
        self._is_closed = False

    def begin_another(self) -> Self:
        """A stream at the beginning of another text, with the same settings. What was made of the stop strings is
        shared: it may take more time and memory than all the rest.
        """
        other = copy.copy(self)
        other._decoder = self._tokenizer.start_decoder()
        other._follows_special = False
        other._plain = self._plain and self._plain.begin_another()
        other._marked = self._marked and self._marked.begin_another()
        other._parts = []
        other._is_closed = False
        return other

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Takes the next token. Returns the stop string that ended the text, or None while none has.

        may_stop: whether a stop string that this token completes counts; one that does not is text like any other.
        After a stop string no more tokens are taken; `take` gives the text before it, or through it with include_stop.
        """
        assert not self._is_closed, "the text has ended"
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return None
        if token_id in self._hidden:
            mark = self._marks.get(token_id)
            return None if mark is None else self._advance(self._decoder.mark(mark), may_stop, ends_in_mark=True)
        text = self._decoder.push(piece) if not self._spaces else self._push_spaced(token_id)
        if self._plain is None:
            if text:
                self._parts.append(text)
            return None
        return self._advance(text, may_stop, ends_in_mark=False)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of a text without stop strings."""
        assert self._plain is None, "a stop string may end the text with any token"
        if self._spaces:
            for token_id in token_ids:
                self.append(token_id)
            return
        hidden, piece_of, push = self._hidden, self._tokenizer.piece, self._decoder.push
        pieces = [piece_of(token_id) for token_id in token_ids if token_id not in hidden]
        self._parts += [push(piece) for piece in pieces if piece is not None]

    def take(self) -> str:
        """The text that can be released now and was not yet. May be empty."""
        text = "".join(self._parts)
        kept = self._num_kept()
        self._parts = [text[len(text) - kept :]] if kept else []
        return text[: len(text) - kept]

    def finish(self, *, may_stop: bool = True) -> str | None:
        """No more tokens: what was held back can be taken, with U+FFFD for bytes that never became a character.

        Returns a stop string that counts if the last of the text completes one. Does nothing once the text has ended.
        """
        if self._is_closed:
            return None
        matched = self._scan(self._decoder.finish(), may_stop)
        self._is_closed = True
        return matched

    def _num_kept(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self._is_closed or self._plain is None:
            return 0
        return max(self._plain.num_kept, self._marked.num_kept if self._marked else 0)

    def _push_spaced(self, token_id: int) -> str:
        """Pushes a token, behind a space if it is a special token that follows another."""
        follows_special = self._follows_special
        self._follows_special = token_id in self._tokenizer.special_token_ids
        space = self._decoder.push(" ") if follows_special and self._follows_special else ""
        return space + self._decoder.push(self._tokenizer.piece(token_id) or "")

    def _advance(self, text: str, may_stop: bool, *, ends_in_mark: bool) -> str | None:
        """Scans text that became final, and looks for a stop string that is complete in text that is not final yet."""
        matched = self._scan(text, may_stop) if text else None
        if matched is None and may_stop and self._is_stop_pending(ends_in_mark):
            matched = self._scan(self._decoder.finish(), may_stop)
        return matched

    def _is_stop_pending(self, ends_in_mark: bool) -> bool:
        """Whether the text would contain a stop string if this token were the last.

        A run of byte-fallback tokens is text for now, though a later byte may spoil it all; to wait for what follows
        would cost a token, and ending here makes it final. An unfinished character counts only with a mark behind it.
        """
        pending = self._decoder.pending()
        if not pending or self._plain is None:
            return False
        if self._decoder.is_incomplete():
            return ends_in_mark and self._marked is not None and self._marked.would_match(pending)
        if self._marked is not None and self._marked.would_match(pending):
            return True
        return self._plain.would_match(_MARKS.sub("", pending))

    def _scan(self, text: str, may_stop: bool) -> str | None:
        """Adds final text, with marks in it, up to the first stop string, which ends it. Returns that string."""
        if self._plain is None:
            self._parts.append(text)
            return None
        if not may_stop:
            self._pass_over(text)
            return None
        if self._marked is None:
            end = self._plain.advance(text)
            self._parts.append(text if end is None else text[:end])
            return self._end_at(self._plain) if end is not None else None
        for char in text:
            is_found = False
            if not MARK_FIRST <= char <= MARK_LAST:
                self._parts.append(char)
                is_found = self._plain.advance(char) is not None
            if self._marked.advance(char) is not None:
                # Of two that end here the longer counts; one that spells special tokens, if they begin together.
                is_longer = not is_found or self._marked.match_length >= self._plain.match_length
                return self._end_at(self._marked if is_longer else self._plain)
            if is_found:
                return self._end_at(self._plain)
        return None

    def _pass_over(self, text: str) -> None:
        """Adds final text in which no stop string counts; one that begins in it may count when it is complete."""
        assert self._plain is not None
        shown = _MARKS.sub("", text)
        self._parts.append(shown)
        self._plain.pass_over(shown)
        if self._marked is not None:
            self._marked.pass_over(text)

    def _end_at(self, matcher: StopMatcher) -> str:
        """Ends the text before the stop string just found at its end, or behind it."""
        text = "".join(self._parts)
        self._parts = [text[: len(text) - matcher.match_length]]
        if self._include_stop:
            self._parts.append(matcher.match)
        self._is_closed = True
        return matcher.match


class StopMatcher:
    """Finds the first of several patterns to be complete in a text that comes in pieces, in time linear in the text.

    The automaton of Aho and Corasick, "Efficient string matching" (CACM 18, 1975). Its state is the longest end of the
    text that begins a pattern: just what must be held back. Marks in patterns count as no characters of the text.
    """

    __slots__ = ("_fail", "_first", "_found", "_goto", "_lengths", "_state")

    def __init__(self, patterns: Mapping[str, str]) -> None:
        """patterns: what to look for, none empty, to the name it is reported by."""
        self._goto: list[dict[str, int]] = [{}]  # state, character: the state one longer
        self._fail: list[int] = [0]  # the longest shorter end that begins a pattern
        self._lengths: list[int] = [0]  # characters of the text in the state's prefix
        self._found: list[tuple[str, int] | None] = [None]  # the longest pattern that ends here: name, length
        self._state = 0
        for pattern, name in patterns.items():
            self._insert(pattern, name)
        self._first = frozenset(self._goto[0])
        self._link()

    def begin_another(self) -> Self:
        """A matcher at the beginning of another text, for the same patterns."""
        other = copy.copy(self)
        other._state = 0
        return other

    @property
    def num_kept(self) -> int:
        """Characters at the text's end that may be the beginning of a pattern."""
        return self._lengths[self._state]

    @property
    def match(self) -> str:
        """Name of the pattern just found."""
        return self._current()[0]

    @property
    def match_length(self) -> int:
        """Characters of the text in the pattern just found."""
        return self._current()[1]

    def advance(self, text: str) -> int | None:
        """Reads on. Returns the number of characters read when a pattern was complete, None if none was."""
        end, self._state = self._walk(text)
        return end

    def pass_over(self, text: str) -> None:
        """Reads on through whatever patterns the text completes."""
        while (end := self.advance(text)) is not None:
            text = text[end:]

    def would_match(self, text: str) -> bool:
        """Whether reading this text would complete a pattern. Changes nothing."""
        return self._walk(text)[0] is not None

    def _walk(self, text: str) -> tuple[int | None, int]:
        state = self._state
        if not state and self._first.isdisjoint(text):
            return None, 0
        goto, fail, found = self._goto, self._fail, self._found
        for index, char in enumerate(text):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if found[state] is not None:
                return index + 1, state
        return None, state

    def _current(self) -> tuple[str, int]:
        found = self._found[self._state]
        assert found is not None, "no pattern was just found"
        return found

    def _insert(self, pattern: str, name: str) -> None:
        state = 0
        for char in pattern:
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self._fail.append(0)
                self._lengths.append(self._lengths[state] + (not MARK_FIRST <= char <= MARK_LAST))
                self._found.append(None)
            state = self._goto[state][char]
        self._found[state] = (name, self._lengths[state])

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, longer in self._goto[state].items():
                queue.append(longer)
                shorter = self._fail[state]
                while shorter and char not in self._goto[shorter]:
                    shorter = self._fail[shorter]
                self._fail[longer] = self._goto[shorter].get(char, 0)
                if self._found[longer] is None:
                    self._found[longer] = self._found[self._fail[longer]]


def _marked_stops(tokenizer: Tokenizer, stop: Sequence[str], marks: dict[int, str]) -> dict[str, str]:
    """The stop strings that spell special tokens, with a mark for each token: pattern to stop string. Fills `marks`."""
    patterns: dict[str, str] = {}
    for text in stop:
        parts = tokenizer.split_special_tokens(text)
        if all(isinstance(part, str) for part in parts):
            continue
        for part in parts:
            if isinstance(part, int) and part not in marks:
                marks[part] = chr(ord(MARK_FIRST) + len(marks))
        if marks and max(marks.values()) > MARK_LAST:
            raise InvalidRequestError("stop spells over 2048 different special tokens; give fewer", field="stop.stop")
        patterns["".join(part if isinstance(part, str) else marks[part] for part in parts)] = text
    return patterns
