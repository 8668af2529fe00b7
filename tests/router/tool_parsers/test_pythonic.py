"""Answers that are a list of calls in Python."""

from __future__ import annotations

import json

import pytest

from octavo_router.tool_parsers.pythonic import PythonicParser
from tests.router.tool_parsers.reading import Reading, read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[get_weather(city="Paris")]', ("", [("get_weather", '{"city": "Paris"}')])),
        ("[now()]", ("", [("now", "{}")])),
        ("[add(a=1, b=-2.5), now()]\n", ("", [("add", '{"a": 1, "b": -2.5}'), ("now", "{}")])),
        ("<|python_start|>[now()]<|python_end|>", ("", [("now", "{}")])),
        ("<|python_start|>[now()]<|python", ("", [("now", "{}")])),
        ("[now()] Fine.", ("Fine.", [("now", "{}")])),
        ("[now(),", ("", [("now", "{}")])),
        ("[now(), go", (", go", [("now", "{}")])),
        (
            "[f(a='\"', b=[True, None, (1, 2)], c={'k': \")]\"}, d='東\\n')]",
            ("", [("f", '{"a": "\\"", "b": [true, null, [1, 2]], "c": {"k": ")]"}, "d": "東\\n"}')]),
        ),
    ],
)
def test_says(text: str, expected: Reading) -> None:
    assert read(PythonicParser, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "It is 18 degrees.",
        " [1, 2]",
        "[]",
        "[",
        "[no",
        "[unknown(a=1)]",
        "[now(1)]",
        "[now(**{})]",
        "[now(a=b)]",
        "[now(a=1",
        "[f(a={1})]",
        "[f(a={1: 2})]",
        "[f(a=b'x')]",
        "[f(a=1e999)]",
        "[f(a='x\ny')]",
        "[f(a='\\ud800')]",
        "[f(a=" + "(" * 300 + "1" + ")" * 300 + ")]",
        "[f(a=[" + "1," * 40_000 + "])]",
        "<|python_start|>now()<|python_end|>",
        "Look: [now()]",
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert read(PythonicParser, text) == (text, [])


def test_arguments_are_json() -> None:
    _, ((_, arguments),) = read(PythonicParser, "[f(a='\\t\"', b=0x10)]")
    assert json.loads(arguments) == {"a": '\t"', "b": 16}


def test_python_says_nothing_of_what_a_model_writes() -> None:
    """An escape that is none is a warning, which would be the end of the call here and in a log elsewhere."""
    assert read(PythonicParser, r"[f(a='\d+')]") == ("", [("f", r'{"a": "\\d+"}')])
