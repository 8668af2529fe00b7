"""Answers in Mistral's two formats."""

from __future__ import annotations

import pytest

from octavo_router.tool_parsers.mistral import MistralParser
from tests.router.tool_parsers.reading import Reading, read

ITEM = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PARIS = ("get_weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[TOOL_CALLS] [{ITEM}]", ("", [PARIS])),
        (f"[TOOL_CALLS][{ITEM}, {ITEM}]\n", ("", [PARIS, PARIS])),
        (f"Let me look. [TOOL_CALLS] [{ITEM}] Fine.", ("Let me look. Fine.", [PARIS])),
        (f"[TOOL_CALLS] {ITEM}", ("", [PARIS])),
        (f"[TOOL_CALLS] [{ITEM},", ("", [PARIS])),
        (f"[TOOL_CALLS] [{ITEM}", ("", [PARIS])),
        (f"[TOOL_CALLS] [{ITEM[:-10]}", ("", [("get_weather", '{"city":')])),
        ('[TOOL_CALLS]get_weather{"city": "Paris"}', ("", [PARIS])),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', ("", [PARIS])),
        (
            '[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
            ("", [PARIS, ("now", "{}")]),
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": {"b": "}', ("", [("f", '{"a": {"b": "}')])),
    ],
)
def test_says(text: str, expected: Reading) -> None:
    assert read(MistralParser, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "It is 18 degrees.",
        "a [TOOL_",
        "a [TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [3]",
        "[TOOL_CALLS]!",
        "[TOOL_CALLS]get_weather",
        "[TOOL_CALLS]get_weather of Paris",
        "[TOOL_CALLS]get_weather[ARGS",
        "[TOOL_CALLS]get_weather[ARGS]" + " " * 1024 + '{"city": "Paris"}',
        "[TOOL_CALLS]get_weather[CALL_ID]x[ARGS] Paris",
        ITEM,
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert read(MistralParser, text) == (text, [])
