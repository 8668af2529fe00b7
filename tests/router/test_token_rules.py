"""Penalties, biases, allowed tokens and bad words: their ranges, and the tokens that spell a word."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format

from octavo.errors import InvalidRequestError
from octavo.v1 import sampling_pb2
from octavo_router.request import NO_RULES, Stopping, TokenRules
from octavo_router.token_rules import bad_word_token_ids, check_bad_words, check_some_token_remains, rules_of


def rules(**fields: Any) -> TokenRules:
    return rules_of(json_format.ParseDict(fields, sampling_pb2.SamplingParams()), vocab_size=100)


class WordTokenizer:
    """Words with known tokens."""

    def __init__(self, words: dict[str, list[int]]) -> None:
        self._words = words

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return self._words[text]


def test_what_asks_for_nothing_is_no_rule() -> None:
    assert rules() is NO_RULES
    assert rules(temperature=0.5, badWords=["x"]) is NO_RULES
    neutral = rules(presencePenalty=0, frequencyPenalty=0, repetitionPenalty=1, logitBias={"5": 0})
    assert neutral == NO_RULES


def test_rules_are_sorted_and_single() -> None:
    assert rules(logitBias={"9": 1.5, "0": -100, "4": 0}).logit_bias == ((0, -100.0), (9, 1.5))
    assert rules(allowedTokenIds=[99, 0, 99]).allowed_token_ids == (0, 99)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"presencePenalty": 2.5}, "presence_penalty", "presence_penalty is 2.5; it must be from -2 to 2"),
        ({"presencePenalty": "NaN"}, "presence_penalty", "nan"),
        ({"frequencyPenalty": -3}, "frequency_penalty", "frequency_penalty is -3; it must be from -2 to 2"),
        ({"repetitionPenalty": 0}, "repetition_penalty", "repetition_penalty is 0; it must be from 0.01 to 100"),
        ({"repetitionPenalty": -1}, "repetition_penalty", "-1"),
        ({"repetitionPenalty": 1e-30}, "repetition_penalty", "1e-30"),
        ({"repetitionPenalty": "Infinity"}, "repetition_penalty", "inf"),
        ({"logitBias": {"100": 1}}, "logit_bias", "logit_bias holds 100; token ids of this model are from 0 to 99"),
        ({"logitBias": {"5": 101}}, "logit_bias", "logit_bias of token 5 is 101; it must be from -100 to 100"),
        ({"logitBias": {"5": "-Infinity"}}, "logit_bias", "logit_bias of token 5 is -inf"),
        ({"logitBias": {"5": "NaN"}}, "logit_bias", "nan"),
        ({"logitBias": {str(i): 1 for i in range(5000)}}, "logit_bias", "has 5000 tokens; at most 4096"),
        ({"allowedTokenIds": [5, 100]}, "allowed_token_ids", "allowed_token_ids holds 100"),
        ({"allowedTokenIds": [5] * 101}, "allowed_token_ids", "has 101 ids; this model has 100 tokens"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rules(**fields)
    assert message in caught.value.message
    assert caught.value.field == f"sampling.{field}"


def test_bounds_are_allowed() -> None:
    assert rules(presencePenalty=-2, frequencyPenalty=2, repetitionPenalty=100, logitBias={"5": -100, "6": 100})
    assert rules(repetitionPenalty=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", ""], "bad_words holds ''; every word must have a character that is not blank"),
        ([" \n"], "not blank"),
        (["x" * 257], "bad_words holds a word of 257 characters; at most 256 are possible"),
        (["x"] * 257, "bad_words has 257 words; at most 256 are possible"),
    ],
)
def test_bad_words_that_are_none_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_bad_words(words)
    assert message in caught.value.message
    assert caught.value.field == "sampling.bad_words"
    check_bad_words(["x" * 256] * 256)


def test_what_is_allowed_may_not_all_be_forbidden_at_first() -> None:
    allowed = rules(allowedTokenIds=[2, 3])
    with pytest.raises(InvalidRequestError, match="which min_tokens, 4, forbids at first") as caught:
        check_some_token_remains(allowed, Stopping(9, min_tokens=4, stop_token_ids=frozenset({3})), frozenset({2}))
    assert caught.value.field == "sampling.allowed_token_ids"
    for stopping in (
        Stopping(9, min_tokens=4),
        Stopping(9, stop_token_ids=frozenset({3})),
        Stopping(9, min_tokens=4, stop_token_ids=frozenset({3}), ignore_eos=True),
    ):
        check_some_token_remains(allowed, stopping, frozenset({2}))
    check_some_token_remains(NO_RULES, Stopping(9, min_tokens=4), frozenset({2}))


def test_a_bad_word_is_forbidden_at_the_beginning_and_behind_a_blank() -> None:
    words = {
        "cat": [10, 11], " cat": [20],  # another token behind a blank
        "dog": [30], " dog": [31],
        "eel": [40, 41], " eel": [5, 40, 41],  # the blank is a token of its own
        "fox": [50], " fox": [50],  # a tokenizer that puts the blank there by itself
    }  # fmt: skip
    found = bad_word_token_ids(["cat", " dog", "eel", "fox", "cat"], WordTokenizer(words))  # type: ignore[arg-type]
    assert found == ((10, 11), (20,), (30,), (31,), (40, 41), (50,))


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="leaves nothing"):
        bad_word_token_ids(["x"], WordTokenizer({"x": [], " x": []}))  # type: ignore[arg-type]
