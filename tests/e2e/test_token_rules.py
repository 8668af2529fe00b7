"""Penalties, biases, allowed tokens and bad words, and what users of other servers reported about them (BR-…)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.e2e.completions import Caller
from tests.e2e.harness import request_of

PROMPT = [5, 6, 7]
END_OF_TEXT, IM_START, IM_END = 0, 1, 2


def tokens(caller: Caller, max_tokens: int = 40, **sampling: Any) -> list[int]:
    return caller.server.generate(PROMPT, max_tokens=max_tokens, **sampling).token_ids


def test_br057_penalties_have_an_effect(caller: Caller) -> None:
    """BR-057: penalties were accepted and did nothing."""

    def tokens_of(**penalty: float) -> list[int]:
        prompt = "ha ha ha ha ha ha ha ha ha ha ha ha"
        return caller.server.generate(prompt, max_tokens=40, **penalty).token_ids

    most = max(Counter(tokens_of()).values())
    assert most > 30, "the model repeats itself where nothing is said"
    assert max(Counter(tokens_of(frequency_penalty=2.0)).values()) < most / 2
    assert max(Counter(tokens_of(repetition_penalty=1.8)).values()) < most / 2
    assert tokens_of(presence_penalty=2.0) != tokens_of()


def test_br057_neutral_values_change_nothing(tiny: Caller) -> None:
    neutral: dict[str, Any] = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {5: 0.0},
    }
    assert tokens(tiny, **neutral) == tokens(tiny)


def test_br058_biases_force_and_forbid(tiny: Caller) -> None:
    """BR-058: what is refused stands in test_bad_input.py."""
    plain = tokens(tiny)
    assert tokens(tiny, 5, logit_bias={77: 100.0}) == [77] * 5
    assert plain[0] not in tokens(tiny, logit_bias={plain[0]: -100.0})


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-12, "top_k": 50},
        {"temperature": 1.0, "logit_bias": dict.fromkeys(range(20, 30), 100.0)},
        {"temperature": 1.0, "logit_bias": dict.fromkeys(range(384), -100.0)},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 2.0, "min_p": 0.0},
        {"temperature": 1.0, "repetition_penalty": 100.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"temperature": 1.0, "repetition_penalty": 0.01},
        {"temperature": 1e-12, "repetition_penalty": 0.01, "logit_bias": {9: 100.0}},
    ],
)
def test_br061_extreme_values_give_tokens(tiny: Caller, sampling: dict[str, Any]) -> None:
    """BR-061: extreme but legal values reached the softmax as infinity."""
    got = tokens(tiny, 12, seed=1, **sampling)
    assert len(got) == 12
    assert all(token_id < 384 for token_id in got)


def test_only_allowed_tokens_come(tiny: Caller) -> None:
    allowed = [60, 61, 200]
    assert set(tokens(tiny, temperature=1.0, seed=4, allowed_token_ids=allowed)) <= set(allowed)
    assert tokens(tiny, 6, allowed_token_ids=[99]) == [99] * 6


def test_bad_words_do_not_come(caller: Caller) -> None:
    """At the beginning of a text and behind a blank, alone and as one of several words."""
    prompt = "The capital of France is"
    plain = caller.complete(prompt, 24)["choices"][0]["text"]
    assert " Paris" in plain
    for words in (["Paris"], ["the", "Paris", " city of"]):
        text = caller.complete(prompt, 24, bad_words=words)["choices"][0]["text"]
        assert not any(f" {word.strip()} " in f"{text} " for word in words), text
        assert text != plain


def test_br042_forced_special_tokens_have_no_blanks_between(tiny: Caller) -> None:
    """BR-042: blanks came between special tokens that were kept."""
    forced = {
        "logit_bias": {str(IM_START): 100, str(IM_END): 100},
        "frequency_penalty": 2,
        "skip_special_tokens": False,
    }
    text = tiny.complete(PROMPT, 6, **forced)["choices"][0]["text"]
    assert text.replace("<|im_start|>", "").replace("<|im_end|>", "") == ""
    spaced = tiny.complete(PROMPT, 6, spaces_between_special_tokens=True, **forced)["choices"][0]["text"]
    assert spaced == text.replace("><", "> <")


def test_rules_survive_preemption(tiny: Caller, pressed: Caller) -> None:
    """A sequence that lost its blocks is sent anew, with the counts of its output."""
    options: dict[str, Any] = {
        "max_tokens": 180, "temperature": 0.8, "seed": 2, "frequency_penalty": 0.4, "repetition_penalty": 1.1,
        "logit_bias": {50: 2.0}, "bad_words": ["a", "the"],
    }  # fmt: skip
    prompts = [[number + 5] * 60 for number in range(12)]
    expected = [tiny.server.generate(prompt, **options) for prompt in prompts]
    before = pressed.server.metric("octavo_preemptions_total")
    answers = pressed.server.generate_all(prompts, len(prompts), **options)
    assert pressed.server.metric("octavo_preemptions_total") > before
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def test_logprobs_are_the_models_own(tiny: Caller) -> None:
    """Biases and penalties choose tokens; what the model thinks of them stays what it was."""
    request = request_of(PROMPT, max_tokens=1, logprobs=3)
    plain = tiny.server.generate(PROMPT, max_tokens=1, logprobs=3)
    biased = tiny.server.generate(PROMPT, max_tokens=1, logprobs=3, logit_bias={77: 100.0}, presence_penalty=1.0)
    assert request.output.logprobs == 3
    assert biased.token_ids == [77]
    assert biased.top == plain.top
    assert biased.logprobs[0] < plain.logprobs[0]
