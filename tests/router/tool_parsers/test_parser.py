"""What holds of every parser: the pieces in which a text comes change nothing, and nothing makes one fail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_router.tool_parsers import PARSERS, parser_of_template
from tests.router.tool_parsers.reading import read, read_so_far

# What answers are made of, right and wrong, so that texts drawn from it come near to every turn of a parser.
_FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>",
    "<|python_end|>", '{"name": "f", "arguments": {"a": "x"}}', '{"name": "f", "parameters": ', '{"name"', ': "add"',
    '"arguments": ', '{"a": [1, "}"]}', '"{\\"a\\": 1}"', "null", "12", "[", "]", "{", "}", "(", ")", ",", ";", ":",
    '"', "'", "\\", " ", "\n", "f", "add(a=1, b='x')", "now()", "é", "🇫🇷", "text", "<", "[TOOL", "\\u00", "=",
]  # fmt: skip
_TEXTS = st.lists(st.sampled_from(_FRAGMENTS), max_size=14).map("".join)


@st.composite
def _cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(_TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", PARSERS)
@given(cut=_cut_texts())
def test_the_pieces_do_not_matter(name: str, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    whole = read(PARSERS[name], text)
    assert read(PARSERS[name], pieces) == whole
    assert read(PARSERS[name], list(text)) == whole
    # Nor for what has come so far: a resume depends on that.
    assert read_so_far(PARSERS[name], pieces) == read_so_far(PARSERS[name], [text])


@pytest.mark.parametrize("name", PARSERS)
@given(text=_TEXTS)
def test_a_text_without_calls_is_all_content(name: str, text: str) -> None:
    content, calls = read(PARSERS[name], text)
    if not calls:
        assert content == text


@pytest.mark.parametrize("name", PARSERS)
def test_long_answers_take_linear_time(name: str) -> None:
    """A quadratic parser would take minutes for this."""
    words = "a word " * 100_000
    assert read(PARSERS[name], words) == (words, [])
    text = '{"name": "f", "arguments": {"a": "' + "x" * 400_000 + '"}}'
    text = {"hermes": f"<tool_call>{text}", "llama3_json": text, "mistral": f"[TOOL_CALLS] {text}"}.get(
        name, "[f(a='" + "x" * 400_000 + "')]"
    )
    _, ((_, arguments),) = read(PARSERS[name], [text[i : i + 4] for i in range(0, len(text), 4)])
    assert len(arguments) > 400_000


_MANY = 30_000


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "pieces",
    [
        [" " * 64] * _MANY,
        ["<tool_call>", *[" " * 64] * _MANY],
        ["<tool_call>" * _MANY],
        ["[TOOL_CALLS]", *["name" * 4] * _MANY],
        ["[TOOL_CALLS]f[CALL_ID]" + " " * 16 * _MANY],
        ["[TOOL_CALLS]" * _MANY],
        ["[", *["name" * 4] * _MANY],
        ["[f(" + "a=1," * _MANY + ")]"],
    ],
    ids=["blanks", "blanks in a call", "marks", "a name", "blanks behind an id", "other marks", "a word", "arguments"],
)
def test_answers_that_are_no_calls_take_linear_time(name: str, pieces: list[str]) -> None:
    """A caller can make a model write such. A quadratic parser would take minutes for each."""
    assert read(PARSERS[name], pieces) == ("".join(pieces), [])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<tool_call>\\n' }}", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<tool_call>\\n<function=f>", ""),
        ("<tool_call>f\\n<arg_key>a</arg_key>", ""),
        ("{{ messages }}", ""),
    ],
)
def test_a_templates_family(source: str, name: str) -> None:
    assert parser_of_template(source) == name
