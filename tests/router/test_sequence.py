"""A request's sequences: how many, how they are sent, and where resumed ones begin."""

from __future__ import annotations

import pytest

from octavo_router.request import Beams, FinishReason, ResumedSample
from octavo_router.sequence import SequenceStatus
from tests.router.fake_worker import expected_output
from tests.router.harness import EOS, Harness, make_limits, make_request, seed_that_stops_after


def test_a_group_has_a_sequence_for_each_sample_or_beam() -> None:
    harness = Harness(make_limits())
    assert len(harness.add(make_request("A", n=2)).sequences) == 2
    assert len(harness.add(make_request("B", n=2, best_of=5)).sequences) == 5
    assert len(harness.add(make_request("C", n=2, beams=Beams(4))).sequences) == 4


def test_samples_to_choose_from_come_with_log_probabilities() -> None:
    harness = Harness(make_limits())
    chosen = harness.add(make_request("A", n=1, best_of=2))
    plain = harness.add(make_request("B", n=2))
    assert chosen.sequences[0].new_sequence().params.return_logprobs
    assert not plain.sequences[0].new_sequence().params.return_logprobs


@pytest.mark.parametrize("num_held", [1, 3, 5])
def test_a_resumed_sample_goes_on_behind_what_is_held(num_held: int) -> None:
    harness = Harness(make_limits())
    tokens = [expected_output(make_request(max_tokens=6), index)[0] for index in range(2)]
    held = ResumedSample(1, tuple(tokens[1][:num_held]), text_byte_count=0)
    harness.add(make_request("A", max_tokens=6, n=2, resumed=(held,)))
    harness.run()
    assert [harness.output("A", index) for index in range(2)] == tokens
    assert harness.delivered("A", 0) == tokens[0]
    assert harness.delivered("A", 1) == tokens[1][num_held:]
    assert harness.groups["A"].num_output_tokens == 12


def test_a_resumed_sample_that_had_ended_stays_ended() -> None:
    harness = Harness(make_limits())
    tokens = expected_output(make_request(max_tokens=6))[0]
    ended = ResumedSample(0, tuple(tokens[:3]), text_byte_count=0, finish_reason=FinishReason.STOP)
    group = harness.add(make_request("A", max_tokens=6, n=2, resumed=(ended,)))
    assert group.num_unfinished == 1
    harness.run()
    assert harness.output("A") == tokens[:3]
    assert harness.delivered("A", 0) == []
    assert len(harness.delivered("A", 1)) == 6


def test_a_sample_whose_last_token_is_held_ends_on_arrival() -> None:
    harness = Harness(make_limits())
    seed = seed_that_stops_after(3)
    tokens = expected_output(make_request(max_tokens=8, seed=seed, ignore_eos=False))[0]
    stopped = make_request(
        "A", max_tokens=8, seed=seed, ignore_eos=False, resumed=(ResumedSample(0, tuple(tokens), text_byte_count=0),)
    )
    group = harness.add(stopped)
    assert group.end_of(group.sequences[0]) == (FinishReason.STOP, next(iter(EOS)))
    assert group.sequences[0].status is SequenceStatus.FINISHED
    full = make_request("B", max_tokens=2, resumed=(ResumedSample(0, (5, 6), text_byte_count=0),))
    group = harness.add(full)
    assert group.end_of(group.sequences[0]) == (FinishReason.LENGTH, None)
    assert group.sequences[0].status is SequenceStatus.FINISHED
    assert (group.num_unfinished, harness.scheduler.num_requests, harness.scheduler.num_waiting_requests) == (0, 0, 0)
    assert harness.send() is None


def test_tokens_are_read_over_the_end_of_the_prompt() -> None:
    harness = Harness(make_limits())
    sequence = harness.add(make_request("A", num_prompt=4)).sequences[0]
    sequence.output_token_ids.extend([10, 11, 12])
    assert sequence.tokens(0, 4) == [2, 3, 4, 5]
    assert sequence.tokens(2, 6) == [4, 5, 10, 11]
    assert sequence.tokens(4, 7) == [10, 11, 12]
    assert sequence.tokens(5, 7) == [11, 12]
