"""Incremental decoding: tokens in, text out as soon as no later token can change it.

A tokenizer.json describes how token strings become text as a chain of decoders that work on the whole list of tokens.
`DecoderPlan` reads that description once; `DecoderPlan.start()` gives a decoder that takes one token at a time and
whose output, joined, is exactly what the whole list gives, invalid UTF-8 included. Two shapes are known:

- byte level (GPT-2, llama 3, Qwen, SmolLM): every token is a string of bytes, and the bytes are UTF-8;
- a chain of per-token rules (llama 2, Mistral, Gemma): Replace, ByteFallback, Metaspace, Strip, Fuse.

Anything else is refused when the tokenizer is loaded, since its output could not be known to be final.

Which tokens are decoded, special tokens and stop strings are left to `tokenizer` and `text_stream`.
The rules follow the `decode_chain` functions of https://github.com/huggingface/tokenizers (tokenizers/src/decoders).
"""

from __future__ import annotations

import copy
import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from octavo.errors import ModelLoadError

REPLACEMENT = "\ufffd"
"""What stands in text for bytes that are not UTF-8."""

MARK_FIRST, MARK_LAST = "\ud800", "\udfff"
"""Marks are single surrogates: characters that no decoded text holds, so that they can travel within text."""

Piece = str | bytes
"""What a token adds to the text: bytes where they are no whole characters, a string otherwise."""


class TokenDecoder(Protocol):
    """The state of one text being decoded. Not for use by two threads at once."""

    def push(self, piece: Piece) -> str:
        """Takes the next token's piece. Returns the text that became final."""

    def mark(self, symbol: str) -> str:
        """Puts a mark behind the characters begun so far; it comes out within the text. Returns text as `push` does."""

    def pending(self) -> str:
        """The text that `finish` would add now. Empty: nothing is held back."""

    def is_incomplete(self) -> bool:
        """Whether what is held back ends within a character."""

    def finish(self) -> str:
        """No more tokens: returns the text held back, with U+FFFD for what never became a character."""


class DecoderPlan:
    """How a tokenizer decodes. Immutable; shared by all texts."""

    def __init__(self, spec: Mapping[str, Any] | None) -> None:
        """spec: the "decoder" part of a tokenizer.json. Raises ModelLoadError for a decoder that is not known."""
        specs = _flatten(spec)
        self.is_byte_level = [part["type"] for part in specs] == ["ByteLevel"]
        self._rules: list[Callable[[str], str]] = []
        self._stages: list[_Stage] = []
        if self.is_byte_level:
            return
        if spec is None:
            self._stages = [_SpaceJoin()]
        fused = False
        for part in specs:
            made = _rule_or_stage(part, fused)
            fused = fused or part["type"] == "Fuse"
            if isinstance(made, _Stage):
                self._stages.append(made)
            elif made is not None and not self._stages:
                self._rules.append(made)
            elif made is not None:
                self._stages.append(_RuleStage(made))

    def piece(self, token: str) -> Piece:
        """The piece of a token, given as the vocabulary spells it."""
        if self.is_byte_level:
            data = _bytes_of(token)
            text, used = utf_8_decode(data, "replace", False)
            return text if used == len(data) and REPLACEMENT not in text else data
        for rule in self._rules:
            token = rule(token)
        return token

    def fallback_byte(self, piece: Piece) -> int | None:
        """The byte that a byte-fallback token stands for. None: it is no such token."""
        if isinstance(piece, str) and any(isinstance(stage, _ByteFallback) for stage in self._stages):
            return int(piece[3:5], 16) if _BYTE_TOKEN.fullmatch(piece) else None
        return None

    def start(self) -> TokenDecoder:
        """A decoder at the beginning of a text."""
        return ByteLevelDecoder() if self.is_byte_level else ChainDecoder([stage.clone() for stage in self._stages])


class ByteLevelDecoder:
    """Concatenates the tokens' bytes and decodes them as UTF-8, one U+FFFD for each maximal invalid part."""

    __slots__ = ("_marks", "_rest")

    def __init__(self) -> None:
        self._rest = b""  # bytes that begin a character and do not end it
        self._marks = ""  # marks that stand behind that character; empty where _rest is

    def push(self, piece: Piece) -> str:
        rest = self._rest
        if not rest and piece.__class__ is str:
            return piece
        data = rest + (piece.encode() if isinstance(piece, str) else piece)
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        if self._marks and text:
            # The unfinished bytes became exactly one character: the one they began, or one U+FFFD.
            text = text[0] + self._marks + text[1:]
            self._marks = ""
        return text

    def mark(self, symbol: str) -> str:
        if not self._rest:
            return symbol
        self._marks += symbol
        return ""

    def pending(self) -> str:
        return REPLACEMENT + self._marks if self._rest else ""

    def is_incomplete(self) -> bool:
        return bool(self._rest)

    def finish(self) -> str:
        text = self.pending()
        self._rest, self._marks = b"", ""
        return text


class ChainDecoder:
    """Passes each token through stages; what comes out of the last one is text."""

    __slots__ = ("_stages",)

    def __init__(self, stages: list[_Stage]) -> None:
        self._stages = stages

    def push(self, piece: Piece) -> str:
        assert isinstance(piece, str), "only byte-level pieces are bytes"
        tokens = [piece]
        for stage in self._stages:
            tokens = stage.push(tokens[0]) if len(tokens) == 1 else [t for token in tokens for t in stage.push(token)]
        return tokens[0] if len(tokens) == 1 else "".join(tokens)

    def mark(self, symbol: str) -> str:
        return self.push(symbol)

    def pending(self) -> str:
        if not any(stage.is_holding() for stage in self._stages):
            return ""
        return ChainDecoder([stage.clone() for stage in self._stages]).finish()

    def is_incomplete(self) -> bool:
        return any(stage.is_incomplete() for stage in self._stages)

    def finish(self) -> str:
        tokens: list[str] = []
        for stage in self._stages:
            tokens = [t for token in tokens for t in stage.push(token)]
            tokens += stage.finish()
        return "".join(tokens)


class _Stage:
    """One decoder of a chain: tokens in, tokens out, in order. Marks are passed on and change nothing."""

    def push(self, token: str) -> list[str]:
        raise NotImplementedError

    def finish(self) -> list[str]:
        return []

    def is_holding(self) -> bool:
        return False

    def is_incomplete(self) -> bool:
        return False

    def clone(self) -> _Stage:
        return copy.copy(self)


class _RuleStage(_Stage):
    """A rule that looks at one token alone."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        self._rule = rule

    def push(self, token: str) -> list[str]:
        return [self._rule(token)]


class _SpaceJoin(_Stage):
    """No decoder at all: tokens are joined by spaces."""

    def __init__(self) -> None:
        self._is_first = True

    def push(self, token: str) -> list[str]:
        if _is_mark(token):
            return [token]
        if self._is_first:
            self._is_first = False
            return [token]
        return [" " + token]


class _ByteFallback(_Stage):
    """Tokens written `<0xE5>` are bytes. A run of them is text if the whole run is UTF-8, else one U+FFFD a byte.

    So a run is held back until the next other token, or until it cannot become valid any more.
    """

    def __init__(self) -> None:
        self._run = bytearray()
        self._num_valid = 0  # bytes at the run's start that are whole characters
        self._is_invalid = False  # the run is known to be invalid, and its bytes are out already
        self._marks: list[tuple[int, str]] = []  # (bytes of the run before it, mark)

    def push(self, token: str) -> list[str]:
        if _BYTE_TOKEN.fullmatch(token):
            return self._push_byte(int(token[3:5], 16))
        if _is_mark(token):
            if self._run and not self._is_invalid:
                self._marks.append((len(self._run), token))
                return []
            return [token]
        if not self._run:
            return [token]
        return [*self.finish(), token]

    def _push_byte(self, byte: int) -> list[str]:
        self._run.append(byte)
        if self._is_invalid:
            return [REPLACEMENT]
        try:
            _, used = utf_8_decode(self._run[self._num_valid :], "strict", False)
        except UnicodeDecodeError:
            held = self._spell(REPLACEMENT * len(self._run), [offset for offset, _ in self._marks])
            self._is_invalid, self._marks = True, []
            return held
        self._num_valid += used
        return []

    def finish(self) -> list[str]:
        if not self._run or self._is_invalid:
            held = []
        elif self._num_valid < len(self._run):
            held = self._spell(REPLACEMENT * len(self._run), [offset for offset, _ in self._marks])
        else:
            # A character that began before a mark stands before it.
            begun = [sum(byte & 0xC0 != 0x80 for byte in self._run[:offset]) for offset, _ in self._marks]
            held = self._spell(self._run.decode(), begun)
            held = ["".join(held)]  # a valid run is one token
        self._run, self._num_valid, self._is_invalid, self._marks = bytearray(), 0, False, []
        return held

    def _spell(self, text: str, positions: list[int]) -> list[str]:
        """The characters of `text` as tokens, with the marks at the given positions."""
        if not self._marks:
            return list(text)
        tokens = list(text)
        for position, (_, mark) in reversed(list(zip(positions, self._marks, strict=True))):
            tokens.insert(position, mark)
        return tokens

    def is_holding(self) -> bool:
        return bool(self._run) and not self._is_invalid

    def is_incomplete(self) -> bool:
        return self.is_holding() and self._num_valid < len(self._run)

    def clone(self) -> _Stage:
        twin = copy.copy(self)
        twin._run, twin._marks = bytearray(self._run), list(self._marks)
        return twin


class _Metaspace(_Stage):
    """The replacement character becomes a space; in the first token it is dropped."""

    def __init__(self, replacement: str, fused: bool) -> None:
        self._replacement = replacement
        self._fused = fused  # the text counts as one token, the first
        self._is_first = True

    def push(self, token: str) -> list[str]:
        if not self._is_first:
            return [token.replace(self._replacement, " ")]
        if not _is_mark(token):
            self._is_first = self._fused
        return [token.replace(self._replacement, "")]


class _StripStart(_Stage):
    """Drops up to `count` characters `content` from the start of the text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def push(self, token: str) -> list[str]:
        if not self._left:
            return [token]
        kept = ""
        for index, char in enumerate(token):
            if char == self._content and self._left:
                self._left -= 1
            elif _is_mark(char):
                kept += char
            else:
                self._left = 0
                return [kept + token[index:]]
        return [kept]


_BYTE_TOKEN = re.compile(r"<0x(?:[0-9A-Fa-f]|\+(?=[0-9A-Fa-f]))[0-9A-Fa-f]>")


def _is_mark(token: str) -> bool:
    return len(token) == 1 and MARK_FIRST <= token <= MARK_LAST


def _flatten(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The decoders of a specification in order, nested sequences opened, parts that change nothing left out."""
    if spec is None:
        return []
    decoders = spec["decoders"] if spec["type"] == "Sequence" else []
    parts = [part for inner in decoders for part in _flatten(inner)] if decoders else [spec]
    # Behind ByteLevel there is one token already.
    return [p for i, p in enumerate(parts) if not (p["type"] == "Fuse" and i and parts[i - 1]["type"] == "ByteLevel")]


def _rule_or_stage(spec: Mapping[str, Any], fused: bool) -> Callable[[str], str] | _Stage | None:
    """A decoder of a chain: a rule for single tokens, or a stage with memory, or None for none.

    fused: the tokens before it were joined, so it sees one token, the text.
    """
    kind = spec["type"]
    if kind == "Fuse":
        return None
    if kind == "Replace" and "String" in spec["pattern"]:
        old, new = spec["pattern"]["String"], spec["content"]
        if len(old) == 1 or (old and not fused):
            return lambda token: token.replace(old, new)
    if kind == "ByteFallback" and not fused:
        return _ByteFallback()
    if kind == "Metaspace":
        scheme = spec.get("prepend_scheme") or ("always" if spec.get("add_prefix_space", True) else "never")
        if scheme == "never":
            return lambda token: token.replace(spec["replacement"], " ")
        return _Metaspace(spec["replacement"], fused)
    if kind == "Strip" and not spec["stop"]:  # at the end, the library itself fails on tokens of nothing else
        content, count = spec["content"], spec["start"]
        return _StripStart(content, count) if fused else lambda token: _strip(token, content, count)
    raise ModelLoadError(
        f"the tokenizer decodes with {dict(spec)}{' behind Fuse' if fused else ''}, which is not supported; "
        "known are ByteLevel alone, and Replace (of a string), ByteFallback, Fuse, Metaspace and Strip (at the start)"
    )


def _strip(token: str, content: str, count: int) -> str:
    start = 0
    while start < min(count, len(token)) and token[start] == content:
        start += 1
    return token[start:]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""The character of a byte-level vocabulary that stands for each byte: character to byte."""


def _bytes_of(token: str) -> bytes:
    """The bytes of a byte-level token. A token with a character outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
