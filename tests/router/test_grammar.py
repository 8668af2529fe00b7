"""Grammars of requests: what is compiled, what is refused and why, and that a hostile one ends nothing but itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from octavo.errors import InvalidRequestError, OverloadedError, UnavailableError, UnsupportedError
from octavo.v1 import sampling_pb2
from octavo.worker.v1 import worker_pb2
from octavo_router import grammar
from octavo_router.grammar import GrammarCompiler, Source, source_of
from octavo_router.worker_client import TokenizerFiles

# A remainder automaton with a hundred million states.
ENDLESS = json.dumps({"type": "integer", "multipleOf": 99999989})


def source(**fields: Any) -> Source:
    return source_of(json_format.ParseDict(fields, sampling_pb2.Grammar()))


@pytest.fixture
async def compiler(tiny_models: dict[str, Path]) -> AsyncIterator[GrammarCompiler]:
    """A compiler for a byte-level tokenizer of 384 tokens."""
    tokenizer_json = (tiny_models["llama-linear-bias"] / "tokenizer.json").read_bytes()
    made = GrammarCompiler(TokenizerFiles(tokenizer_json, worker_pb2.TokenizerDefaults(eos_token_ids=[0])))
    yield made
    await made.close()


def test_sources_name_their_kind() -> None:
    assert source(jsonObject=True) == Source("json_object", "")
    assert source(jsonSchema="{}") == Source("json_schema", "{}")
    assert source(regex="a") == Source("regex", "a")
    assert source(lark="start: X") == Source("lark", "start: X")
    assert source(choices={"choices": ["é", "b"]}) == Source("choices", '["é", "b"]')


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({}, "sampling.grammar", "grammar says nothing"),
        ({"jsonObject": False}, "sampling.grammar", "grammar says nothing"),
        ({"jsonSchema": ""}, "sampling.grammar.json_schema", "json_schema is empty"),
        ({"choices": {}}, "sampling.grammar.choices", "choices is empty or holds an empty text"),
        ({"choices": {"choices": ["a", ""]}}, "sampling.grammar.choices", "choices is empty or holds an empty text"),
        ({"regex": "a" * 131073}, "sampling.grammar.regex", "regex has 131073 characters; at most 131072"),
        (
            {"choices": {"choices": ["a"] * 200_000}},
            "sampling.grammar.choices",
            "choices has 600004 bytes; at most 131072 characters",
        ),
    ],
)
def test_what_is_no_source_is_refused(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        source(**fields)
    assert message in caught.value.message
    assert caught.value.field == field


async def test_schemas_keep_the_order_of_their_keys(compiler: GrammarCompiler) -> None:
    schema = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"type":"string"}},"required":["z"]}'
    compiled = json.loads(await compiler.compile(source(jsonSchema=schema)))
    (only,) = compiled["grammars"]
    assert list(only["json_schema"]["properties"]) == ["z", "a"]
    assert only["json_schema"]["x-guidance"] == {
        "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "
    }  # fmt: skip


async def test_each_kind_compiles(compiler: GrammarCompiler) -> None:
    for fields in (
        {"jsonObject": True},
        {"jsonSchema": "true"},
        {"regex": "[a-z]+/\\d"},
        {"choices": {"choices": ["a", 'é\n"', "\\x", "\u0001", "日本😀", "^$.*"]}},
        {"lark": 'start: "a" | "b"'},
        {"lark": 'root ::= "a" | [0-9]+'},
    ):
        assert json.loads(await compiler.compile(source(**fields)))["grammars"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"jsonSchema": "{"}, "json_schema cannot be enforced: Expecting property name"),
    ({"jsonSchema": "[]"}, "a schema is a JSON object"),
    ({"jsonSchema": '{"type": "strin"}'}, "Invalid type: strin"),
    ({"jsonSchema": '{"type": "array", "uniqueItems": true}'}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"jsonSchema": '{"type": "integer", "minimum": 5, "maximum": 2}'}, "minimum (5) is greater than maximum (2)"),
    ({"jsonSchema": '{"$ref": "https://example.com/s.json"}'}, "does not fetch resources"),
    ({"jsonSchema": "[" * 5000}, "recursion"),
    ({"regex": "("}, "regex cannot be enforced: at 1(8): invalid regex"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "[a&&b]"}, "regex cannot be enforced"),
    ({"regex": "(((a{100}){100}){100}){100}"}, "regex cannot be enforced"),
    ({"lark": "start: foo"}, 'unknown name: "foo"'),
    ({"lark": "root ::= ("}, "Expected"),
]


async def test_what_cannot_be_compiled_is_refused_with_the_reason(compiler: GrammarCompiler) -> None:
    for fields, reason in REFUSED:
        asked = source(**fields)
        with pytest.raises(InvalidRequestError) as caught:
            await compiler.compile(asked)
        assert reason in caught.value.message
        assert "\n" not in caught.value.message
        assert caught.value.field == f"sampling.grammar.{asked.kind}"


async def test_a_hostile_grammar_ends_its_compiler_alone(compiler: GrammarCompiler) -> None:
    hostile = asyncio.create_task(compiler.compile(source(jsonSchema=ENDLESS)))
    waiting = [asyncio.create_task(compiler.compile(source(regex=f"a{{{i}}}"))) for i in range(1, 4)]
    with pytest.raises(InvalidRequestError, match="it takes too long to compile"):
        await hostile
    assert all(await asyncio.gather(*waiting))
    # It is remembered: no second process ends for it.
    process = compiler._process
    with pytest.raises(InvalidRequestError, match="too long"):
        await compiler.compile(source(jsonSchema=ENDLESS))
    assert compiler._process is process


async def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    first, second = await asyncio.gather(*(compiler.compile(source(regex="a+")) for _ in range(2)))
    assert first is second
    await compiler.close()
    assert await compiler.compile(source(regex="a+")) is first


async def test_old_grammars_are_forgotten(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_REMEMBERED_LENGTH", 700)
    for letter in "abcd":
        await compiler.compile(source(regex=letter * 50))
    assert [kept.text[0] for kept in compiler._remembered] == ["c", "d"]


async def test_a_compiler_that_was_killed_is_replaced(compiler: GrammarCompiler) -> None:
    await compiler.compile(source(regex="a"))
    assert compiler._process is not None
    os.kill(compiler._process.pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="was killed"):
        await compiler.compile(source(regex="b"))
    assert await compiler.compile(source(regex="b"))


async def test_too_many_at_once_are_an_overload(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILING", 2)
    waiting = [asyncio.create_task(compiler.compile(source(regex=letter))) for letter in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="2 grammars wait"):
        await compiler.compile(source(regex="c"))
    assert all(await asyncio.gather(*waiting))


async def test_who_goes_away_does_not_stop_who_stays(compiler: GrammarCompiler) -> None:
    gone = asyncio.create_task(compiler.compile(source(regex="a+")))
    stays = asyncio.create_task(compiler.compile(source(regex="a+")))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays


async def test_a_tokenizer_that_is_none_offers_no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TokenizerFiles(b"{}", worker_pb2.TokenizerDefaults()))
    for regex in "ab":
        with pytest.raises(UnsupportedError, match=r"grammars are not offered with this model's tokenizer: ."):
            await compiler.compile(source(regex=regex))
        # It is remembered: no second process starts for it.
        monkeypatch.delattr(asyncio, "create_subprocess_exec", raising=False)
    await compiler.close()
