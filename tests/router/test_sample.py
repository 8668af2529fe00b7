"""One sample by itself: which end counts, and what is still to be sent of a text that its caller holds in part."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ResumeMismatchError
from octavo_router.request import FinishReason, Request, ResumedSample
from octavo_router.sample import End, Sample, blank_text
from octavo_router.tokenizer import Tokenizer
from tests.router.fake_client import letter_tokenizer
from tests.router.harness import make_request
from tests.router.text_samples import byte_level

C, D, E, F = 2, 3, 4, 5
NO_STOPS: frozenset[int] = frozenset()


def sample_of(request: Request, tokenizer: Tokenizer) -> Sample:
    return Sample(request, blank_text(request, tokenizer))


def make_sample(**request: Any) -> Sample:
    return sample_of(make_request(**({"max_tokens": 10} | request)), letter_tokenizer())


def held(*token_ids: int, text_byte_count: int | None = None, **fields: Any) -> ResumedSample:
    return ResumedSample(0, token_ids, len(token_ids) if text_byte_count is None else text_byte_count, **fields)


def test_the_token_of_an_end_adds_no_text_unless_it_is_asked_for() -> None:
    for include, text in ((False, "C"), (True, "CD")):
        sample = make_sample(include_stop_in_text=include)
        sample.append(C, None)
        sample.append(D, End(FinishReason.STOP, D))
        assert (sample.take_text(), sample.end) == (text, End(FinishReason.STOP, D))


def test_a_resumed_sample_goes_on_behind_its_text() -> None:
    sample = make_sample()
    assert not sample.resume(held(C, D, cumulative_logprob=-1.5), NO_STOPS)
    sample.append(E, None)
    assert sample.take_text() == "E"
    assert (sample.num_tokens, sample.num_held, sample.num_new_tokens) == (3, 2, 1)
    assert sample.cumulative_logprob == -1.5


def test_text_that_the_caller_has_not_got_comes_at_once() -> None:
    sample = make_sample()
    assert sample.resume(held(C, D, E, text_byte_count=1), NO_STOPS)
    assert sample.take_text() == "DE"
    assert sample.take_text() == ""


def test_a_stop_string_may_begin_in_what_is_held() -> None:
    sample = make_sample(stop=("DEF",))
    assert not sample.resume(held(C, D, E, text_byte_count=1), NO_STOPS)
    sample.append(F, None)
    assert (sample.take_text(), sample.end) == ("", End(FinishReason.STOP, "DEF"))


def test_what_is_held_of_the_text_is_known() -> None:
    sample = make_sample()
    assert sample.resume(held(C, D, E, text_byte_count=2), NO_STOPS)
    assert (sample.held_text, sample.take_text()) == ("CD", "E")
    assert make_sample().held_text == ""


def test_text_that_was_held_back_for_a_stop_string_comes_when_it_is_none() -> None:
    sample = make_sample(stop=("DEF",))
    assert not sample.resume(held(C, D, E, text_byte_count=1), NO_STOPS)
    sample.append(C, None)
    assert (sample.take_text(), sample.end) == ("DEC", None)


def test_a_character_may_be_held_in_part() -> None:
    tokenizer = byte_level()
    first, *rest = tokenizer.encode("Ω", add_special_tokens=False)
    sample = sample_of(make_request(max_tokens=10), tokenizer)
    assert not sample.resume(held(first, text_byte_count=0), NO_STOPS)
    for token_id in rest:
        sample.append(token_id, None)
    assert sample.take_text() == "Ω"


@pytest.mark.parametrize(
    ("request_fields", "end", "text"),
    [
        ({"max_tokens": 3}, End(FinishReason.LENGTH), "DE"),
        ({"stop": ("DE",)}, End(FinishReason.STOP, "DE"), ""),
        ({"stop_ids": frozenset({E})}, End(FinishReason.STOP, E), "D"),
    ],
)
def test_an_end_that_the_caller_does_not_know_of_is_told(request_fields: dict[str, Any], end: End, text: str) -> None:
    stop_ids = request_fields.pop("stop_ids", NO_STOPS)
    sample = make_sample(**request_fields)
    assert sample.resume(held(C, D, E, text_byte_count=1), stop_ids)
    assert (sample.take_text(), sample.end) == (text, end)


def test_a_sample_that_had_ended_yields_nothing_more() -> None:
    sample = make_sample()
    assert not sample.resume(held(C, D, text_byte_count=1, finish_reason=FinishReason.STOP), NO_STOPS)
    assert (sample.end, sample.num_tokens, sample.take_text()) == (End(FinishReason.STOP), 2, "")


@pytest.mark.parametrize(
    ("request_fields", "sample", "message"),
    [
        ({}, held(C, D, text_byte_count=3), "holds 3 bytes of text of sample 0, which cannot be: its tokens gave 2"),
        ({"stop": ("DE",)}, held(C, D, E, F), "holds 4 tokens of sample 0, which ends behind 3"),
        ({"stop": ("DEF",)}, held(C, D, E), "holds 3 bytes of text of sample 0, which cannot be: its tokens gave 1"),
    ],
)
def test_what_the_request_cannot_have_given_is_refused(
    request_fields: dict[str, Any], sample: ResumedSample, message: str
) -> None:
    with pytest.raises(ResumeMismatchError) as caught:
        make_sample(**request_fields).resume(sample, NO_STOPS)
    assert message in caught.value.message


def test_half_a_character_cannot_be_held() -> None:
    tokenizer = byte_level()
    sample = sample_of(make_request(max_tokens=10), tokenizer)
    token_ids = tokenizer.encode("Ω", add_special_tokens=False)
    with pytest.raises(ResumeMismatchError, match="in whole characters"):
        sample.resume(held(*token_ids, text_byte_count=1), NO_STOPS)
