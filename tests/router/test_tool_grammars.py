"""Grammars of required calls: what they admit, and that the families' parsers read it."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo_router.tool_definitions import ToolDefinition
from octavo_router.tool_grammars import call_grammar
from octavo_router.tool_parsers import PARSERS
from tests.router.text_samples import byte_level

TOOLS = [
    ToolDefinition(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city"],
            "$defs": {"days": {"type": "integer"}},
        },
    ),
    ToolDefinition("now", {"type": "object", "properties": {}}),
    ToolDefinition("any", {}),
]
WEATHER, NOW = '{"name": "get_weather", "arguments": {"city": "東京", "days": 3}}', '{"name": "now", "arguments": {}}'
ANY = '{"name": "any", "arguments": {"a": [1, null, "::= \\""]}}'


def admits(
    text: str,
    family: str,
    *,
    is_required: bool = True,
    has_several: bool = True,
    template: str = "",
    tools: Any = TOOLS,
) -> bool:
    """Whether an answer is what the grammar admits, from its first character to its last."""
    lark = call_grammar(
        family, tools, is_required=is_required, has_several=has_several, special_ids={}, template=template
    )
    grammar = LLMatcher.grammar_from_lark(lark)
    assert LLMatcher.validate_grammar(grammar) == ""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


GOOD = [
    ("hermes", hermes(WEATHER), ""),
    ("hermes", hermes(NOW, ANY, WEATHER), ""),
    ("llama3_json", WEATHER.replace("arguments", "parameters"), ""),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {NOW}]", ""),
    ("mistral", f"[TOOL_CALLS][{ANY}]", ""),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', "[ARGS]"),
]


@pytest.mark.parametrize(("family", "text", "template"), GOOD)
def test_calls_are_admitted_and_read(family: str, text: str, template: str) -> None:
    assert admits(text, family, template=template)
    parser = PARSERS[family](frozenset({"get_weather", "now", "any"}))
    content = parser.feed(text).content + parser.finish().content
    assert (content, parser.num_calls) == ("", text.count("name") or text.count("[ARGS]"))


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", ""),
        ("hermes", "Paris"),
        ("hermes", hermes(WEATHER) + "\n"),
        ("hermes", hermes('{"name": "unknown", "arguments": {}}')),
        ("hermes", hermes('{"name": "get_weather", "arguments": {}}')),
        ("hermes", hermes('{"name": "get_weather", "arguments": {"city": 3}}')),
        ("hermes", hermes('{"name": "now", "arguments": {"a": 1}}')),
        ("hermes", hermes('{"name": "get_weather", "arguments": {"city": "Paris", "country": "France"}}')),
        ("hermes", hermes('{"name": "any", "arguments": []}')),
        ("hermes", hermes('{"name":  "now", "arguments": {}}')),
        ("llama3_json", WEATHER),
        ("llama3_json", WEATHER.replace("arguments", "parameters") * 2),
        ("mistral", f"[{WEATHER}]"),
        ("mistral", "[TOOL_CALLS] []"),
    ],
)
def test_what_is_no_call_is_not_admitted(family: str, text: str) -> None:
    assert not admits(text, family)


def test_a_single_call_where_one_is_allowed() -> None:
    assert admits(hermes(NOW), "hermes", has_several=False)
    assert not admits(hermes(NOW, NOW), "hermes", has_several=False)
    assert not admits(f"[TOOL_CALLS] [{NOW}, {NOW}]", "mistral", has_several=False)


def test_the_caller_names_the_tool() -> None:
    assert admits(hermes(NOW), "hermes", tools=TOOLS[1:2])
    assert not admits(hermes(WEATHER), "hermes", tools=TOOLS[1:2])


def test_marks_that_are_special_tokens_are_those_tokens() -> None:
    tokenizer = byte_level()
    lark = call_grammar(
        "hermes", TOOLS[1:2], is_required=True, has_several=False, special_ids={"<tool_call>": 420}, template=""
    )
    assert "<[420]>" in lark
    matcher = LLMatcher(
        LLTokenizer(tokenizer._backend.to_str(), eos_token=[2]), LLMatcher.grammar_from_lark(lark), log_level=0
    )
    mask = matcher.compute_bitmask()
    assert [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1] == [420]


@pytest.mark.parametrize(("family", "text", "template"), [*GOOD, ("hermes", "", ""), ("mistral", "1 < 2\n[TOOL", "")])
def test_calls_of_free_choice_may_have_text_around_them(family: str, text: str, template: str) -> None:
    assert admits(text, family, is_required=False, template=template)
    assert admits(f"Well.\n{text}", family, is_required=False, template=template)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "Well. <tool_call>\nParis\n</tool_call>"),
        ("hermes", "Well. " + hermes('{"name": "unknown", "arguments": {}}')),
        ("hermes", hermes(WEATHER) + " Well. " + hermes('{"name": "get_weather", "arguments": {}}')),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": 3}}]'),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", ' {"city": "Paris"}'),
    ],
)
def test_no_other_calls_of_free_choice_are_admitted(family: str, text: str) -> None:
    assert not admits(text, family, is_required=False)


def test_special_tokens_begin_calls_of_free_choice() -> None:
    for family, special in (("hermes", "<tool_call>"), ("llama3_json", "<|python_tag|>")):
        lark = call_grammar(
            family, TOOLS[1:2], is_required=False, has_several=True, special_ids={special: 1}, template=""
        )
        matcher = LLMatcher(
            LLTokenizer(byte_level()._backend.to_str(), eos_token=[2]), LLMatcher.grammar_from_lark(lark), log_level=0
        )
        assert not matcher.get_error()
        mask = matcher.compute_bitmask()
        # The call, the end, and text; no other special token.
        assert [i for i in range(4) if mask[i // 8] >> (i % 8) & 1] == [1, 2, 3], family
