"""Beams inside the scheduler: rounds, forks and the end. "fork B.0->B.1 token 7 [0 2]" makes B.1 a copy of B.0 with one
more token, on blocks 0 and 2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo_router.plan import Candidates, StepResult
from octavo_router.request import Beams, EarlyStopping
from octavo_router.results import ProtocolError, RequestFailed
from octavo_router.sequence import SequenceStatus
from tests.router.fake_worker import expected_hypotheses, expected_output
from tests.router.harness import Harness, make_limits, make_request

Golden = Callable[[str, str], None]


def test_transcript_beams(golden: Golden) -> None:
    """Each step waits for every beam's candidates; beams that are dropped give up their blocks, and those that
    continue one parent share its full blocks."""
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=6, max_tokens=5, beams=Beams(3)))
    harness.run()
    golden("beams", harness.transcript)


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_beams_find_what_the_search_alone_finds(
    early_stopping: EarlyStopping, length_penalty: float, max_plans_in_flight: int
) -> None:
    harness = Harness(make_limits(max_num_tokens=9, max_plans_in_flight=max_plans_in_flight))
    request = make_request(
        "A", num_prompt=11, max_tokens=20, n=2, ignore_eos=False, beams=Beams(4, length_penalty, early_stopping)
    )
    harness.add(request)
    harness.add(make_request("B", num_prompt=20, max_tokens=8))
    harness.run()
    assert harness.hypotheses("A") == expected_hypotheses(request)
    assert harness.output("B") == expected_output(harness.groups["B"].request)[0]
    assert (harness.num_used, harness.worker.num_used) == (0, 0)


def test_places_are_set_aside_for_beams_to_come() -> None:
    harness = Harness(make_limits(max_num_seqs=4))
    harness.add(make_request("A", max_tokens=9))
    harness.add(make_request("B", num_prompt=40, max_tokens=6, beams=Beams(3)))
    harness.add(make_request("C", max_tokens=6))
    harness.step()
    assert [sequence.group.request.request_id for sequence in harness.scheduler.running] == ["A", "B"]
    harness.run()
    assert harness.hypotheses("B") == expected_hypotheses(harness.groups["B"].request)


@pytest.mark.parametrize("num_rounds", range(5))
def test_a_lost_session_costs_a_round_at_most(num_rounds: int) -> None:
    harness = Harness(make_limits(max_plans_in_flight=1))
    request = make_request("A", num_prompt=5, max_tokens=8, beams=Beams(3))
    harness.add(request)
    for _ in range(num_rounds):
        harness.step()
    harness.disconnect()
    harness.connect()
    harness.run()
    assert harness.hypotheses("A") == expected_hypotheses(request)


def test_cancelled_beams_give_everything_back() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=5, max_tokens=30, beams=Beams(4)))
    for _ in range(6):
        harness.step()
    harness.cancel("A")
    harness.run()
    assert (harness.num_used, harness.worker.num_used, harness.scheduler.num_requests) == (0, 0, 0)
    assert {beam.status for beam in harness.groups["A"].sequences} == {SequenceStatus.FINISHED}


def test_beams_that_can_never_fit_are_refused() -> None:
    harness = Harness(make_limits(num_blocks=10, max_num_seqs=4))
    with pytest.raises(InvalidRequestError, match="beam_width is 5; a step has at most 4 sequences"):
        harness.add(make_request(beams=Beams(5)))
    # Two shared blocks of the prompt and, for each beam, two of its own.
    harness.add(make_request("A", num_prompt=8, max_tokens=8, beams=Beams(4)))
    with pytest.raises(ContextLengthError, match="4 beams of 17 tokens behind a prompt of 8 take up to 14 blocks"):
        harness.add(make_request("B", num_prompt=8, max_tokens=9, beams=Beams(4)))
    harness.run()
    assert harness.hypotheses("A") == expected_hypotheses(harness.groups["A"].request)


def test_a_search_that_needs_more_candidates_than_there_are_tokens_is_refused() -> None:
    harness = Harness(dataclasses.replace(make_limits(), vocab_size=8))
    harness.add(make_request("A", num_prompt=3, beams=Beams(4)))
    with pytest.raises(InvalidRequestError, match="needs 10 candidates a step, and the vocabulary has 8 tokens"):
        harness.add(make_request("B", num_prompt=3, beams=Beams(5)))
    assert harness.scheduler.num_requests == 1


def test_too_few_candidates_fail_the_request_alone() -> None:
    harness = Harness(make_limits())
    beam = harness.add(make_request("A", num_prompt=3, beams=Beams(2))).sequences[0]
    harness.send()
    (event,) = harness.scheduler.apply(StepResult(1, 1, [], [], candidates=[Candidates(beam.sequence_id, [5], [-1.0])]))
    assert isinstance(event, RequestFailed)
    assert "1 candidates for a beam" in event.message


@pytest.mark.parametrize(
    "candidates",
    [
        [],
        [Candidates(99, [5], [-1.0])],
        [Candidates(1, [5], [])],
        [Candidates(1, [5], [-1.0]), Candidates(1, [5], [-1.0])],
    ],
)
def test_candidates_that_do_not_fit_their_plan_change_nothing(candidates: list[Candidates]) -> None:
    harness = Harness(make_limits())
    request = make_request("A", num_prompt=3, beams=Beams(2))
    harness.add(request)
    harness.send()
    with pytest.raises(ProtocolError):
        harness.scheduler.apply(StepResult(1, 1, [], [], candidates=candidates))
    harness.run()
    assert harness.hypotheses("A") == expected_hypotheses(request)
