"""Answers in Llama 3's format."""

from __future__ import annotations

import pytest

from octavo_router.tool_parsers.llama3_json import Llama3JsonParser
from tests.router.tool_parsers.reading import Reading, read

ONE = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
PARIS = ("get_weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE, ("", [PARIS])),
        ("\n " + ONE + "\n", ("", [PARIS])),
        (ONE + "; " + ONE, ("", [PARIS, PARIS])),
        (ONE + ";", ("", [PARIS])),
        (ONE + " Fine.", ("Fine.", [PARIS])),
        ("<|python_tag|>" + ONE, ("", [PARIS])),
        ("Let me look. <|python_tag|>" + ONE, ("Let me look.", [PARIS])),
        ('{"type": "function", "name": "f", "parameters": {}}', ("", [("f", "{}")])),
        ('{"name": "f", "arguments": {"a": [1, {}]}}', ("", [("f", '{"a": [1, {}]}')])),
        ('{"name": "f", "parameters": {"a": 1', ("", [("f", '{"a": 1')])),
        ('<|python_tag|>{"name": "unknown", "parameters": {}}', ("", [("unknown", "{}")])),
    ],
)
def test_says(text: str, expected: Reading) -> None:
    assert read(Llama3JsonParser, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " It is 18 degrees. ",
        '{"city": "Paris", "name": "f", "parameters": {}}',
        '{"name": "Bob", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "f", "age": 3}',
        "{",
        '{"name": "f", "param',
        "Answer: " + ONE,
        '<|python_tag|>brave_search.call(query="weather")',
        "a <|python_",
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert read(Llama3JsonParser, text) == (text, [])


def test_other_json_does_not_wait_for_its_end() -> None:
    assert Llama3JsonParser().feed('{"city": ').content == '{"city":'
