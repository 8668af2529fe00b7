"""Answers in Hermes' and Qwen's format."""

from __future__ import annotations

import pytest

from octavo_router.tool_parsers.hermes import HermesParser
from tests.router.tool_parsers.reading import Reading, read

ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ("get_weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", [])),
        ("It is 18 degrees.\n", ("It is 18 degrees.\n", [])),
        (ONE, ("", [PARIS])),
        ("Let me look.\n\n" + ONE, ("Let me look.", [PARIS])),
        (ONE + "\n" + ONE.replace("Paris", "東京"), ("", [PARIS, ("get_weather", '{"city": "東京"}')])),
        (ONE + "\nDone. \n", ("Done. \n", [PARIS])),
        ("a " + ONE + " b " + ONE, ("a b", [PARIS, PARIS])),
        # Several in one pair of marks.
        (
            '<tool_call>[\n{"name": "now", "arguments": {}},\n{"name": "f", "arguments": {"a": []}}\n]</tool_call>!',
            ("!", [("now", "{}"), ("f", '{"a": []}')]),
        ),
        ('a <tool_call>[{"name": "now"}\n</tool_call>', ("a", [("now", "{}")])),
        ('<tool_call>[{"name": "now"}, ', ("", [("now", "{}")])),
        # The name after the arguments, other keys, no white space.
        (
            '<tool_call>{"id":1,"arguments":{"city":"Paris"},"name":"get_weather","x":[{}]}</tool_call>',
            ("", [("get_weather", '{"city":"Paris"}')]),
        ),
        ('<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")])),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', ("", [("now", "{}")])),
        # Arguments as JSON text within a string, as OpenAI's own messages have them.
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": "Paris"}</tool_call>', ("", [("f", '"Paris"')])),
        ('<tool_call>{"name": "f", "parameters": [1, 2]}</tool_call>', ("", [("f", "[1, 2]")])),
        # Markup, brackets and escapes inside a string are the string's.
        (
            '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\"{\\\\"}}</tool_call>',
            ("", [("f", '{"a": "}</tool_call>\\"{\\\\"}')]),
        ),
        # A name that is no tool's is a call all the same: the markup says so.
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', ("", [("unknown", "{}")])),
        # Small models forget a brace or the mark, or have one too many.
        ('<tool_call>{"name": "f", "arguments": {}\n</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>x', ("x", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {}}\n', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {}}\n' + ONE, ("", [("f", "{}"), PARIS])),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_', ("", [("f", "{}")])),
    ],
)  # fmt: skip
def test_says(text: str, expected: Reading) -> None:
    assert read(HermesParser, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "1 <tool",
        "a \n<tool_call>",
        "<tool_call>\n get_weather(Paris)\n</tool_call>",
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f",',
        '<tool_call>{"name": "f", "arguments": ',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>{}</tool_call>",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert read(HermesParser, text) == (text, [])


def test_a_call_behind_what_is_none_is_found() -> None:
    assert read(HermesParser, "<tool_call>\n" + ONE) == ("<tool_call>\n", [PARIS])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"city": "Par', '{"city": "Par'),
        ('<tool_call>{"name": "f", "arguments": "{\\"a', '"{\\"a'),
        ('<tool_call>{"name": "f", "arguments": 12', "12"),
    ],
)
def test_a_call_that_was_cut_off_has_what_came_of_its_arguments(text: str, arguments: str) -> None:
    assert read(HermesParser, text) == ("", [("f", arguments)])


def test_arguments_come_as_the_model_writes_them() -> None:
    parser = HermesParser()
    assert not parser.feed('<tool_call>\n{"name": "get_').calls
    (begun,) = parser.feed('weather", "arguments": {"ci').calls
    assert (begun.index, begun.name, begun.arguments) == (0, "get_weather", '{"ci')
    (more,) = parser.feed('ty": "Pa').calls
    assert (more.index, more.name, more.arguments) == (0, None, 'ty": "Pa')
    (last,) = parser.feed('ris"}}\n</tool_call>').calls
    assert last.arguments == 'ris"}'


def test_content_waits_only_while_it_may_be_a_mark() -> None:
    parser = HermesParser()
    assert parser.feed("1 <").content == "1"
    assert parser.feed("t").content == ""
    assert parser.feed("2").content == " <t2"
