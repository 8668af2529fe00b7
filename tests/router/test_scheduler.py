"""The scheduler: instructive cases as transcripts, rules one by one, and everything at once by random search."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo_router.plan import StepResult
from octavo_router.request import Beams, FinishReason, Request, ResumedSample
from octavo_router.results import BeamsFinished, ProtocolError, RequestFailed, TokenSampled
from octavo_router.scheduler import Scheduler
from octavo_router.sequence import SequenceStatus
from tests.router.fake_worker import POISON, expected_hypotheses, expected_output
from tests.router.harness import EOS, Harness, make_limits, make_request, seed_that_stops_after

Golden = Callable[[str, str], None]

# Transcripts. In a plan, "A 4..7* +[2]" computes A's positions 4 to 7, samples behind them (*), and appends block 2.


def test_transcript_chunked_prefill(golden: Golden) -> None:
    """A prompt longer than the budget is split, and the decode beside it never misses a step."""
    harness = Harness(make_limits(max_num_tokens=8))
    harness.add(make_request("A", num_prompt=3, max_tokens=6))
    harness.step()
    harness.add(make_request("B", num_prompt=20, max_tokens=2))
    harness.run()
    golden("chunked_prefill", harness.transcript)


def test_transcript_end_of_sequence_under_lookahead(golden: Golden) -> None:
    """The token computed past an end-of-sequence token is dropped; max_tokens causes none."""
    harness = Harness(make_limits())
    harness.add(make_request("A", max_tokens=8, seed=seed_that_stops_after(3), ignore_eos=False))
    harness.add(make_request("B", max_tokens=4))
    harness.run()
    assert harness.output("A")[-1] == 1
    golden("end_of_sequence", harness.transcript)


def test_transcript_preemption(golden: Golden) -> None:
    """The younger one is held back until its token is in, gives up its blocks, and starts again when they fit."""
    harness = Harness(make_limits(num_blocks=4))
    harness.add(make_request("A", num_prompt=6, max_tokens=7))
    harness.add(make_request("B", num_prompt=4, max_tokens=6))
    harness.run()
    assert harness.scheduler.num_preemptions == 1
    golden("preemption", harness.transcript)


def test_transcript_cancel(golden: Golden) -> None:
    """A running request that is cancelled is released with the next plan; what is in flight for it is dropped."""
    harness = Harness(make_limits(num_blocks=6))
    harness.add(make_request("A", num_prompt=5, max_tokens=8))
    harness.add(make_request("B", num_prompt=5, max_tokens=4))
    harness.step()
    harness.cancel("A")
    harness.run()
    golden("cancel", harness.transcript)


def test_transcript_session_lost(golden: Golden) -> None:
    """A new worker gets everything anew, with the tokens so far; what was in flight comes again, once."""
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=3, max_tokens=5))
    harness.step()
    harness.add(make_request("B", num_prompt=6, max_tokens=3))
    harness.step()
    harness.disconnect()
    harness.connect()
    harness.run()
    golden("session_lost", harness.transcript)


def test_transcript_samples_in_waves(golden: Golden) -> None:
    """More samples than places run one after the other."""
    harness = Harness(make_limits(max_num_seqs=2))
    harness.add(make_request("A", num_prompt=3, max_tokens=2, n=3))
    harness.run()
    golden("samples_in_waves", harness.transcript)


# Rules


def test_samples_equal_single_requests_with_the_next_seeds() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", max_tokens=6, n=3, seed=2**64 - 1))
    for index, seed in enumerate((2**64 - 1, 0, 1)):
        harness.add(make_request(f"B{index}", max_tokens=6, seed=seed))
    harness.run()
    for index in range(3):
        assert harness.output("A", index) == harness.output(f"B{index}")


@pytest.mark.parametrize("max_plans_in_flight", [1, 2, 4])
def test_as_many_plans_are_in_flight_as_the_worker_takes(max_plans_in_flight: int) -> None:
    harness = Harness(make_limits(max_plans_in_flight=max_plans_in_flight))
    harness.add(make_request(max_tokens=10))
    while harness.send() is not None:
        pass
    # Without lookahead a decode needs its token first; with it, each plan computes the token of the one before.
    assert len(harness.in_flight) == max_plans_in_flight


def test_nothing_is_planned_past_max_tokens() -> None:
    harness = Harness(make_limits(max_plans_in_flight=4))
    harness.add(make_request(num_prompt=5, max_tokens=2))
    plans = []
    while (plan := harness.send()) is not None:
        plans.append(plan)
    assert [plan.num_tokens for plan in plans] == [5, 1]


def test_nothing_to_do_is_no_plan() -> None:
    harness = Harness(make_limits())
    assert harness.send() is None
    harness.add(make_request(max_tokens=1))
    harness.run()
    assert harness.send() is None
    assert not harness.worker.sequences
    assert harness.num_used == 0


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"), [(31, 1, True), (1, 31, True), (32, 1, False), (16, 17, False)]
)
def test_a_request_that_fills_the_pool_runs_and_a_larger_one_is_refused(
    num_prompt: int, max_tokens: int, fits: bool
) -> None:
    harness = Harness(make_limits(block_size=4, num_blocks=8))
    request = make_request(num_prompt=num_prompt, max_tokens=max_tokens)
    if fits:
        harness.add(request)
        harness.run()
        assert harness.output("A") == expected_output(request)[0]
    else:
        with pytest.raises(
            ContextLengthError, match=rf"{num_prompt} tokens.*{num_prompt + max_tokens} together.*32 \(8"
        ):
            harness.add(request)
        assert harness.scheduler.num_requests == 0


def test_a_request_over_the_models_length_is_refused() -> None:
    harness = Harness(make_limits(max_model_len=20))
    with pytest.raises(ContextLengthError, match="limit is 20"):
        harness.add(make_request(num_prompt=17, max_tokens=4))


def test_without_chunked_prefill_a_prompt_is_computed_whole() -> None:
    harness = Harness(make_limits(max_num_tokens=10, enable_chunked_prefill=False))
    harness.add(make_request("A", num_prompt=6, max_tokens=6))
    harness.add(make_request("B", num_prompt=6, max_tokens=2))
    first = harness.send()
    assert first is not None
    assert first.token_counts == [6]
    second = harness.send()
    assert second is not None
    assert second.token_counts == [1, 6]
    with pytest.raises(ContextLengthError, match="without chunked prefill the limit is max_num_batched_tokens, 10"):
        harness.add(make_request("C", num_prompt=11))
    harness.run()


def test_nobody_overtakes_the_first_that_waits() -> None:
    harness = Harness(make_limits(num_blocks=6))
    harness.add(make_request("A", num_prompt=8, max_tokens=8))
    harness.step()
    harness.add(make_request("B", num_prompt=20, max_tokens=1))
    harness.add(make_request("C", num_prompt=1, max_tokens=1))
    harness.step()
    assert [sequence.group.request.request_id for sequence in harness.scheduler.running] == ["A"]
    harness.run()
    ends = [event.sequence.group.request.request_id for event in token_events(harness) if event.finish_reason]
    assert ends == ["A", "B", "C"]


def test_a_lower_priority_number_goes_first() -> None:
    harness = Harness(make_limits(max_num_seqs=2))
    for name in "ABCD":
        harness.add(make_request(name, max_tokens=20, priority=1))
    harness.step()
    harness.add(make_request("E", max_tokens=5, priority=0))
    harness.run()
    ends = [event.sequence.group.request.request_id for event in token_events(harness) if event.finish_reason]
    assert ends.index("E") < ends.index("C")


def test_the_lowest_priority_is_preempted_although_it_came_first() -> None:
    harness = Harness(make_limits(num_blocks=5))
    harness.add(make_request("A", num_prompt=4, max_tokens=14, priority=1))
    harness.step()
    harness.add(make_request("B", num_prompt=4, max_tokens=14, priority=0))
    harness.run()
    assert harness.groups["A"].sequences[0].num_preemptions > 0
    assert harness.groups["B"].sequences[0].num_preemptions == 0


def test_a_long_request_is_not_preempted_by_later_short_ones() -> None:
    harness = Harness(make_limits(num_blocks=30, max_num_seqs=4))
    harness.add(make_request("long", num_prompt=4, max_tokens=100))
    for index in range(60):
        harness.add(make_request(f"short{index}", num_prompt=6, max_tokens=10))
        harness.step()
    harness.run()
    assert harness.groups["long"].sequences[0].num_preemptions == 0


def test_a_crowd_of_older_requests_preempts_a_younger_one_a_few_times_only() -> None:
    harness = Harness(make_limits(block_size=1, num_blocks=300, max_num_seqs=64, max_num_tokens=512))
    for index in range(60):
        harness.add(make_request(f"old{index}", num_prompt=2, max_tokens=2 + 2 * index))
    harness.step()
    harness.add(make_request("young", num_prompt=1, max_tokens=30))
    harness.run()
    # With the same spare room after each preemption there would be 140 preemptions of all, and 5 of this one.
    assert harness.groups["young"].sequences[0].num_preemptions <= 4
    assert harness.scheduler.num_preemptions <= 110


def test_blocks_released_by_a_plan_are_used_from_the_next_one_on() -> None:
    harness = Harness(make_limits(num_blocks=2))
    harness.add(make_request("A", num_prompt=7, max_tokens=1))
    harness.add(make_request("B", num_prompt=7, max_tokens=1))
    harness.step()
    releasing = harness.send()
    assert releasing is not None
    assert len(releasing.release_sequence_ids) == 1
    assert not releasing.sequence_ids
    following = harness.send()
    assert following is not None
    assert following.new_block_ids
    harness.run()


def test_one_sequences_failure_ends_its_request_alone() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", max_tokens=4, n=2, first_token=POISON))
    harness.add(make_request("B", max_tokens=4))
    harness.run()
    failures = [event for event in harness.events if isinstance(event, RequestFailed)]
    assert [(event.group.request.request_id, event.message) for event in failures] == [("A", "the prompt is poisoned")]
    assert harness.output("B") == expected_output(make_request("B", max_tokens=4))[0]
    assert harness.num_used == 0


def test_stop_token_ids_end_a_sample_and_min_tokens_puts_them_off() -> None:
    plain = expected_output(make_request(max_tokens=8))[0]
    harness = Harness(make_limits())
    harness.add(make_request("A", max_tokens=8, stop_token_ids=frozenset({plain[2]})))
    harness.add(make_request("B", max_tokens=8, stop_token_ids=frozenset({plain[2]}), min_tokens=5))
    harness.run()
    assert harness.output("A") == plain[:3]
    assert plain[2] not in harness.output("B")[:5]
    last = next(event for event in token_events(harness) if event.finish_reason)
    assert (last.finish_reason, last.matched) == (FinishReason.STOP, plain[2])


def test_logprobs_come_with_the_tokens_of_those_who_asked() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", max_tokens=2))
    harness.add(make_request("B", max_tokens=2, logprobs=2))
    harness.add(make_request("C", max_tokens=2, logprobs=0))
    harness.run()
    for event in token_events(harness):
        asked = event.sequence.group.request.output.logprobs
        if asked is None:
            assert event.logprobs is None
        else:
            assert event.logprobs is not None
            assert event.logprobs.token_id == event.token_id
            assert event.logprobs.logprob == -(event.token_id + 1) / 8
            assert len(event.logprobs.top) == asked


def test_answers_of_another_session_and_repeated_ones_are_ignored() -> None:
    harness = Harness(make_limits())
    harness.add(make_request(max_tokens=3))
    plan = harness.send()
    assert plan is not None
    result = harness.worker.execute(harness.in_flight.popleft())
    assert len(harness.scheduler.apply(result)) == 1
    assert harness.scheduler.apply(result) == []
    harness.disconnect()
    assert harness.scheduler.apply(result) == []
    harness.connect()
    harness.send()
    assert harness.scheduler.apply(result) == []
    harness.run()
    assert harness.output("A") == expected_output(make_request(max_tokens=3))[0]


def test_answers_that_do_not_fit_their_plan_change_nothing() -> None:
    harness = Harness(make_limits())
    group = harness.add(make_request(max_tokens=3))
    harness.send()
    sequence_id = group.sequences[0].sequence_id
    for step_seq, sequence_ids, token_ids in ((2, [], []), (1, [], []), (1, [99], [5]), (1, [sequence_id], [5, 6])):
        with pytest.raises(ProtocolError):
            harness.scheduler.apply(StepResult(1, step_seq, sequence_ids, token_ids))
    assert group.sequences[0].output_token_ids == []
    harness.run()


def test_a_smaller_worker_fails_what_it_cannot_hold() -> None:
    harness = Harness(make_limits(num_blocks=20))
    harness.add(make_request("A", num_prompt=30, max_tokens=30))
    harness.add(make_request("B", num_prompt=5, max_tokens=5))
    harness.step()
    harness.disconnect()
    harness.connect(make_limits(num_blocks=10))
    (failure,) = (event for event in harness.events if isinstance(event, RequestFailed))
    assert failure.group.request.request_id == "A"
    assert "60 together" in failure.message
    harness.run()
    assert harness.output("B") == expected_output(make_request("B", num_prompt=5, max_tokens=5))[0]


def test_counts_return_to_zero_however_requests_end() -> None:
    harness = Harness(make_limits(max_num_seqs=2))
    for index in range(8):
        harness.add(make_request(str(index), max_tokens=30, n=2))
    harness.step()
    for index in range(8):
        harness.cancel(str(index))
        harness.cancel(str(index))
    scheduler = harness.scheduler
    assert (scheduler.num_waiting, len(scheduler.running), scheduler.num_requests) == (0, 0, 0)
    assert (scheduler.num_waiting_requests, scheduler.num_waiting_prompt_tokens, harness.num_used) == (0, 0, 0)
    harness.run()
    assert harness.worker.num_used == 0


def test_a_stop_string_ends_a_sequence_wherever_it_is() -> None:
    harness = Harness(make_limits(max_num_seqs=1))
    running = harness.add(make_request("A", max_tokens=30)).sequences[0]
    waiting = harness.add(make_request("B", max_tokens=30)).sequences[0]
    harness.step()
    assert (running.status, waiting.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    for sequence in (running, waiting, running):
        harness.scheduler.finish(sequence)
        harness.check()
    harness.run()
    assert len(running.output_token_ids) == 1


def count_calls(function: Callable[[], Any]) -> int:
    """How many calls, of Python or of C, a function makes."""
    calls = 0

    def trace(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(trace)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_a_plan(num_waiting: int) -> int:
    scheduler = Scheduler(make_limits(max_num_seqs=4, max_plans_in_flight=1000), eos_token_ids=EOS)
    scheduler.begin_session(1, scheduler.limits)
    for index in range(4 + num_waiting):
        scheduler.add(make_request(str(index), max_tokens=50), now=0.0)
    scheduler.plan(0.0)
    return count_calls(lambda: scheduler.plan(1.0))


def test_a_plan_costs_nothing_for_those_who_wait() -> None:
    assert calls_of_a_plan(10) == calls_of_a_plan(5_000)


# Random search

REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "num_prompt": st.integers(1, 30),
            "max_tokens": st.integers(1, 24),
            "seed": st.integers(0, 1000),
            "n": st.sampled_from([1, 1, 1, 2, 3]),
            "best_of": st.sampled_from([1, 1, 4]),
            "beam_width": st.sampled_from([0, 0, 0, 1, 3]),
            "num_held": st.sampled_from([0, 0, 0, 2, 30]),
            "priority": st.sampled_from([0, 0, 0, 1, -1]),
            "min_tokens": st.sampled_from([0, 0, 3]),
            "ignore_eos": st.booleans(),
            "logprobs": st.sampled_from([None, None, 0, 2]),
            "first_token": st.sampled_from([2, 2, 2, 2, 2, 2, 3, 4, POISON]),
            "cache_salt": st.sampled_from(["", "", "", None]),
        }
    ),
    min_size=1,
    max_size=12,
)
LIMITS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "num_blocks": st.integers(2, 40),
        "max_num_seqs": st.integers(1, 6),
        "max_num_tokens": st.integers(1, 40),
        "max_plans_in_flight": st.integers(1, 4),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "num_host_blocks": st.sampled_from([0, 2, 10, 40]),
        "swaps": st.booleans(),
    }
)


def requested(request_id: str, *, beam_width: int, num_held: int, **fields: Any) -> Request:
    """A request for samples, of which the first may be resumed, or for beams. One that fails is not resumed: it might
    end on arrival, before it can."""
    if beam_width:
        fields.update(n=min(fields["n"], beam_width), best_of=1)
        return make_request(request_id, beams=Beams(beam_width), **fields)
    if num_held == 0 or fields["first_token"] == POISON:
        return make_request(request_id, **fields)
    tokens = tuple(expected_output(make_request(request_id, **fields))[0][:num_held])
    return make_request(request_id, resumed=(ResumedSample(0, tokens, text_byte_count=0),), **fields)


@given(LIMITS, REQUESTS, st.integers(0, 2**32))
@settings(max_examples=250, deadline=None)
def test_every_request_ends_once_with_its_own_tokens(
    limits: dict[str, Any], requests: list[dict[str, Any]], seed: int
) -> None:
    """Random arrivals, departures, lost sessions, flushes and small pools: invariants hold after every call (by the
    harness), the fake worker finds no fault, every request ends exactly once, with the tokens of a run on its own."""
    rng = random.Random(seed)
    # Sessions are lost at random, now and then so often beside one request that it would fail for it.
    harness = Harness(make_limits(**limits), max_worker_failures=200)
    to_come = [requested(f"R{index}", **request) for index, request in enumerate(requests)]
    accepted = []
    cancelled: set[str] = set()
    for _ in range(200):
        action = rng.random()
        if to_come and action < 0.15:
            request = to_come.pop()
            try:
                harness.add(request)
                accepted.append(request)
            except InvalidRequestError:
                assert request.request_id not in harness.groups
        elif accepted and action < 0.17:
            request = rng.choice(accepted)
            if harness.groups[request.request_id].num_unfinished:
                cancelled.add(request.request_id)
            harness.cancel(request.request_id)
        elif action < 0.18:
            harness.disconnect()
            harness.connect()
        elif action < 0.185:
            harness.scheduler.flush_prefix_cache()
            harness.check()
        elif action < 0.6:
            harness.send()
        elif harness.in_flight:
            harness.answer()
    harness.run()

    scheduler = harness.scheduler
    assert (scheduler.num_requests, harness.num_used, harness.worker.num_used) == (0, 0, 0)
    assert scheduler.blocks.host.num_used == 0
    assert not harness.worker.sequences
    failed = [event.group.request.request_id for event in harness.events if isinstance(event, RequestFailed)]
    found = [event.group.request.request_id for event in harness.events if isinstance(event, BeamsFinished)]
    ends = [event.sequence.sequence_id for event in token_events(harness) if event.finish_reason]
    for once in (failed, found, ends):
        assert len(set(once)) == len(once)
    for request in accepted:
        is_cut_off = request.request_id in cancelled or POISON in request.prompt_token_ids
        assert (request.request_id in failed) == (is_cut_off and request.request_id not in cancelled)
        if request.sampling.beams is None:
            check_samples(harness, request, is_cut_off)
        elif is_cut_off:
            assert request.request_id not in found
        else:
            assert harness.hypotheses(request.request_id) == expected_hypotheses(request)
        if len({other.priority for other in accepted}) == 1:
            most = max(sequence.num_preemptions for sequence in harness.groups[request.request_id].sequences)
            assert most <= math.log2(limits["num_blocks"]) + 2


def check_samples(harness: Harness, request: Request, is_cut_off: bool) -> None:
    """Each sample has the tokens of a run on its own, and what was not held of it was delivered once."""
    for index, sequence in enumerate(harness.groups[request.request_id].sequences):
        tokens, reason = expected_output(request, index)
        held = [token_id for sample in request.resumed if sample.sample_index == index for token_id in sample.token_ids]
        delivered = [event for event in token_events(harness) if event.sequence is sequence]
        assert held + [event.token_id for event in delivered] == sequence.output_token_ids
        if is_cut_off:
            assert sequence.output_token_ids == tokens[: len(sequence.output_token_ids)]
        else:
            assert sequence.output_token_ids == tokens
            assert [event.finish_reason for event in delivered[-1:]] == [reason] * (len(held) < len(tokens))


def token_events(harness: Harness) -> list[TokenSampled]:
    return [event for event in harness.events if isinstance(event, TokenSampled)]
