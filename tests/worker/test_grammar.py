from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.grammar import GrammarEngine, GrammarUnavailableError, SequenceGrammar
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.tokenizer import TokenizerBundle
from tests.worker.checkpoints import ids_to_letters, letter_tokenizer, letters_to_ids, tokenizer_content

YES_NO = "start: /(yes|no)+/"


def no_news() -> None:
    """Nobody wants to know that grammars get compiled."""


def as_json(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def allowed(engine: GrammarEngine, *states: tuple[SequenceGrammar, list[int]]) -> list[str]:
    """What each sequence may get behind its output; "$" for each end of sequence."""
    outputs = [np.array(output, np.int32) for _, output in states]
    pending = engine.start(np.arange(len(states)), [state for state, _ in states], outputs)
    assert pending.collect(no_news) == {}
    return [ids_to_letters(ids_of(mask)) for mask in pending.masks]


def problem(engine: GrammarEngine, grammar: str, output: list[int]) -> str:
    return engine.start(np.arange(1), [engine.begin(grammar)], [np.array(output, np.int32)]).collect(no_news)[0]


@pytest.mark.parametrize("grammar", [YES_NO, as_json(YES_NO)])
def test_tokens_follow_the_grammar_and_all_ends_are_allowed_where_it_accepts(
    grammar: str, letters: GrammarEngine
) -> None:
    state = letters.begin(grammar)
    text = letters_to_ids("yesno")
    found = [allowed(letters, (state, text[:count]))[0] for count in range(len(text) + 1)]
    assert found == ["ny", "e", "s", "$$ny", "o", "$$ny"]


def test_behind_an_end_there_are_only_ends(letters: GrammarEngine) -> None:
    """A sequence that has ended may be planned for another step before the router knows."""
    for end, grammar in ((0, YES_NO), (1, YES_NO), (0, "start: /yes/"), (1, "start: /yes/")):
        state = letters.begin(grammar)
        output = letters_to_ids("yes")
        assert allowed(letters, (state, output)) == ["$$ny" if grammar == YES_NO else "$$"]
        for _ in range(3):
            output = [*output, end]
            assert allowed(letters, (state, output)) == ["$$"]
        assert allowed(letters, (letters.begin(YES_NO), [*letters_to_ids("no"), end, 1 - end])) == ["$$"]


def test_a_grammar_that_is_over_leaves_only_ends(letters: GrammarEngine) -> None:
    assert allowed(letters, (letters.begin('start: "ab"'), letters_to_ids("ab"))) == ["$$"]


def test_state_follows_from_the_output_alone(letters: GrammarEngine) -> None:
    text = letters_to_ids('{"a":[1,-23]}')
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    stepwise = letters.begin(grammar)
    for count in range(len(text) + 1):
        at_once = letters.begin(grammar)
        one, other = allowed(letters, (stepwise, text[:count]), (at_once, text[:count]))
        assert one == other
        assert one == ("$$" if count == len(text) else one.replace("$", ""))


def test_sequences_do_not_share_their_state(letters: GrammarEngine) -> None:
    states = [letters.begin(YES_NO) for _ in range(3)]
    outputs = [letters_to_ids(text) for text in ("", "yesn", "no")]
    assert allowed(letters, *zip(states, outputs, strict=True)) == ["ny", "o", "$$ny"]
    outputs = [letters_to_ids(text) for text in ("y", "yesno", "noy")]
    assert allowed(letters, *zip(states, outputs, strict=True)) == ["e", "$$ny", "e"]


def test_one_that_fails_leaves_the_others_alone(letters: GrammarEngine) -> None:
    states = [letters.begin(grammar) for grammar in (YES_NO, "start: nothing", YES_NO, YES_NO)]
    outputs = [np.array(letters_to_ids(text), np.int32) for text in ("yes", "", "maybe", "n")]
    pending = letters.start(np.array([5, 6, 7, 8]), states, outputs)
    problems = pending.collect(no_news)
    assert pending.rows.tolist() == [5, 6, 7, 8]
    assert {*problems} == {1, 2}
    assert 'unknown name: "nothing"' in problems[1]
    assert "doesn't satisfy the grammar" in problems[2]
    assert [ids_to_letters(ids_of(pending.masks[row])) for row in (0, 3)] == ["$$ny", "o"]
    again = letters.start(np.array([7]), [states[2]], [np.append(outputs[2], np.int32(1))])
    assert "doesn't satisfy the grammar" in again.collect(no_news)[0]


def test_one_that_cannot_be_compiled_leaves_the_others_alone(
    letters: GrammarEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_or_panic(tokenizer: Any, text: str, **options: Any) -> LLMatcher:
        if text == "panic":
            raise BaseException("as the library's panics are")
        return LLMatcher(tokenizer, text, **options)

    monkeypatch.setattr("octavo_worker.grammar.LLMatcher", compile_or_panic)
    states = [letters.begin(text) for text in ("panic", YES_NO + "  ")]
    pending = letters.start(np.arange(2), states, [np.zeros(0, np.int32)] * 2)
    assert pending.collect(no_news) == {0: "the grammar failed: BaseException while it was compiled"}
    assert ids_to_letters(ids_of(pending.masks[1])) == "ny"


def test_a_step_that_waits_tells_of_each_grammar_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three goes on only when the wait has told of the first two."""
    engine, told = GrammarEngine(letter_tokenizer()), threading.Event()

    def compile_slowly(tokenizer: Any, text: str, **options: Any) -> LLMatcher:
        if text == 'start: "c"':
            assert told.wait(30)
        return LLMatcher(tokenizer, text, **options)

    monkeypatch.setattr("octavo_worker.grammar.LLMatcher", compile_slowly)
    monkeypatch.setattr("octavo_worker.grammar._LOOK_S", 0.01)
    begun = threading.Event()
    engine._compiler.submit(begun.wait)
    states = [engine.begin(f'start: "{letter}"') for letter in "abc"]
    pending = engine.start(np.arange(3), states, [np.zeros(0, np.int32)] * 3)

    def num_compiled() -> int:
        count = pending.num_compiled()
        begun.set()
        return count

    assert dataclasses.replace(pending, num_compiled=num_compiled).collect(told.set) == {}
    assert told.is_set()
    assert [ids_to_letters(ids_of(mask)) for mask in pending.masks] == ["a", "b", "c"]


@pytest.mark.parametrize("token_id", [96, 1 << 20, (1 << 31) - 1])
def test_tokens_that_the_tokenizer_does_not_have_fit_no_grammar(token_id: int, letters: GrammarEngine) -> None:
    assert "the grammar failed" in problem(letters, "start: /.*/", [5, token_id])


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("{", "EOF while parsing"),
        ('{"grammars": []}', "empty grammars array"),
        ("root ::= x", "Expected token"),
        ('{"grammars": [{"json_schema": {"type": "strin"}}]}', "Invalid type: strin"),
        ('{"grammars": [{"json_schema": false}]}', "Unsatisfiable schema"),
    ],
)
def test_texts_that_are_no_grammars(grammar: str, message: str, letters: GrammarEngine) -> None:
    found = problem(letters, grammar, [])
    assert found.startswith("the grammar failed: ")
    assert message in found
    assert "<" not in found


def test_messages_are_bounded(letters: GrammarEngine) -> None:
    found = problem(letters, "start: " + "(" * 5000 + '"a"' + ")" * 5000, [])
    assert "too deeply nested" in found
    assert len(found) < 600
    assert found.endswith("...")


def test_compiled_grammars_are_kept_and_their_number_is_bounded() -> None:
    engine = GrammarEngine(letter_tokenizer())
    for index in (*range(90), 89, 88):
        assert allowed(engine, (engine.begin(f'start: "{index}"'), letters_to_ids(str(index)))) == ["$$"]
    assert len(engine._compiled) == 64
    assert [*engine._compiled][-2:] == ['start: "89"', 'start: "88"']


def test_of_the_default_model() -> None:
    """A mask has a bit for every token, and is the same whether a text came token by token or at once."""
    tokenizer = open_checkpoint(find_model("SmolLM2-135M-Instruct")).tokenizer
    engine, encoder = GrammarEngine(tokenizer), Tokenizer.from_str(tokenizer.tokenizer_json.decode())
    assert engine.num_words == 49152 // 32
    capitals = engine.start(np.arange(1), [engine.begin("start: /[A-Z]/")], [np.zeros(0, np.int32)])
    assert capitals.collect(no_news) == {}
    assert ids_of(capitals.masks[0]) == sorted(encoder.token_to_id(chr(65 + index)) for index in range(26))
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "kind": {"enum": ["mountain", "mouse"]}}}
    schema |= {"required": ["name", "kind"], "additionalProperties": False}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    text = np.array(encoder.encode('{"name": "Z\u00fcrich \U0001f642", "kind": "mountain"}').ids, np.int32)
    state = engine.begin(grammar)
    for count in range(len(text) + 1):
        both = engine.start(np.arange(2), [state, engine.begin(grammar)], [text[:count]] * 2)
        assert both.collect(no_news) == {}
        assert ids_of(both.masks[0]) == ids_of(both.masks[1])
        assert count == len(text) or text[count] in ids_of(both.masks[0])
    assert ids_of(both.masks[0]) == list(tokenizer.defaults.eos_token_ids)


def ids_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_tokenizers_that_do_not_do() -> None:
    with pytest.raises(GrammarUnavailableError, match="no end-of-sequence token"):
        GrammarEngine(letter_tokenizer(eos_token_ids=[]))
    with pytest.raises(GrammarUnavailableError, match="no end-of-sequence token"):
        GrammarEngine(letter_tokenizer(eos_token_ids=[500]))
    without_decoder = json.dumps(tokenizer_content(96)).encode()
    with pytest.raises(GrammarUnavailableError, match="does not read the tokenizer: can't determine decoder type"):
        GrammarEngine(TokenizerBundle(without_decoder, pb.TokenizerDefaults(eos_token_ids=[1]), 96))


def test_ends_beyond_the_tokenizer_are_left_out() -> None:
    engine = GrammarEngine(letter_tokenizer(eos_token_ids=[1, 5000]))
    assert allowed(engine, (engine.begin('start: "a"'), letters_to_ids("a"))) == ["$"]
