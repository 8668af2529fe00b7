"""The program that compiles grammars. A process of its own, so that a hostile grammar can end it and never the router.

What needs more than half a second of CPU time or a few GiB of memory ends this process, and with it the grammar: it
never gets to a worker, where it would keep others waiting. Requests come on stdin and are answered on stdout, a frame
each: its length in 4 bytes, big-endian, then JSON. The first request brings the tokenizer. `grammar.py` starts this
program and knows what its end means.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, gbnf_to_lark

MAX_CPU_S = 0.5
NUM_TRIED_STEPS = 8
MAX_MEMORY_BYTES = 4 << 30
MAX_REASON_LENGTH = 400

# JSON as Python's json.dumps writes it, and no other whitespace: a small model may go on with blanks for ever. Of a
# schema's own "x-guidance" every entry counts more than these.
_JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The worker's: what compiles here compiles there.
_LIMITS = LLParserLimits(max_lexer_states=100_000, step_max_items=20_000, verbose_errors=False)
_LENGTH = struct.Struct(">I")
# Lines of an error that only point into the text: "   1 | start: foo" and "   ^^^".
_POINTERS = re.compile(r"\s*\d+ \|.*|[\s^]*")


def main() -> None:
    """Serves requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = _read(source)
    if first is None:
        return
    try:
        tokenizer = LLTokenizer(first["tokenizer"], eos_token=first["eos_token_ids"] or None)
    except Exception as error:
        _write(target, {"error": _reason(str(error))})
        return
    _write(target, {})
    while (request := _read(source)) is not None:
        # Its default action ends the process, wherever the library is.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = compile_grammar(tokenizer, request["kind"], request["text"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(target, answer)


def compile_grammar(tokenizer: LLTokenizer, kind: str, text: str) -> dict[str, str]:
    """{"grammar": llguidance's JSON}, or {"error": why there is none}. kind: a key of _BUILDERS."""
    try:
        grammar = _BUILDERS[kind](text)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        can_begin = not matcher.is_error() and _try(matcher, tokenizer.eos_tokens)
    except Exception as error:
        return {"error": _reason(str(error) or type(error).__name__)}
    if matcher.is_error():
        return {"error": _reason(matcher.get_error())}
    return {"grammar": grammar} if can_begin else {"error": "no text matches it"}


def _try(matcher: LLMatcher, ends: Iterable[int]) -> bool:
    """Takes some steps, since some grammars fail or take their time only then. Returns whether there is a first one.

    ends: end-of-sequence tokens, which are not taken.
    """
    going_on = ~sum(1 << token_id for token_id in set(ends))
    for step in range(NUM_TRIED_STEPS):
        possible = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = possible & going_on
        if not allowed:
            return step > 0 or possible != 0
        lowest, highest = (allowed & -allowed).bit_length() - 1, allowed.bit_length() - 1
        if not matcher.consume_token(highest if step % 2 else lowest) or matcher.is_stopped():
            break
    return True


def _json_object(text: str) -> str:
    return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON_OPTIONS)


def _json_schema(text: str) -> str:
    schema = json.loads(text)
    if schema is True:
        text = "{}"
    elif not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)


def _choices(text: str) -> str:
    alternatives = ("".join(map(_escaped, choice)) for choice in json.loads(text))
    return LLMatcher.grammar_from_regex("|".join(alternatives))


def _escaped(char: str) -> str:
    return char if char.isalnum() else f"\\x{{{ord(char):X}}}"


def _lark(text: str) -> str:
    # Many grammars that were written for vLLM are in GBNF, which is told from Lark by its arrows.
    return json.dumps({"grammars": [{"lark_grammar": gbnf_to_lark.any_to_lark(text)}]}, ensure_ascii=False)


_BUILDERS: dict[str, Callable[[str], str]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "choices": _choices,
    "lark": _lark,
}


def _reason(message: str) -> str:
    """A library's message on one line."""
    message = message.replace("<non-verbose/>", "")
    reason = " ".join(line.strip() for line in message.splitlines() if not _POINTERS.fullmatch(line))
    return reason if len(reason) <= MAX_REASON_LENGTH else reason[:MAX_REASON_LENGTH] + "..."


def _read(source: BinaryIO) -> Any:
    """The next frame; None at the end."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return json.loads(source.read(*_LENGTH.unpack(head)))


def _write(target: BinaryIO, answer: dict[str, str]) -> None:
    data = json.dumps(answer).encode()
    target.write(_LENGTH.pack(len(data)) + data)
    target.flush()


if __name__ == "__main__":
    main()
