"""When a request is sent again and what it then says, in a time that the test moves."""

from __future__ import annotations

import pytest

from octavo.errors import DeadlineError, InvalidRequestError, OctavoError, OverloadedError, UnavailableError
from octavo.output_builder import OutputBuilder
from octavo.resumption import Resumption, is_accepted
from octavo.v1 import inference_pb2 as pb

LOST = UnavailableError("lost")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    clock: Clock, *, timeout_s: float | None = None, resume_timeout_s: float = 10.0, wait: bool = False
) -> Resumption:
    request = pb.GenerateRequest(text="p")
    return Resumption(
        request,
        OutputBuilder(request),
        timeout_s=timeout_s,
        resume_timeout_s=resume_timeout_s,
        wait_for_server=wait,
        clock=clock,
    )


def test_metadata_tell_whether_a_request_was_accepted() -> None:
    assert is_accepted([("x", "1"), ("octavo-accepted", "1")])
    assert not is_accepted([("x", "1")])
    assert not is_accepted(None)


@pytest.mark.parametrize("error", [InvalidRequestError("no"), DeadlineError("late"), OverloadedError("full")])
def test_what_the_server_decided_is_final(error: OctavoError) -> None:
    assert make(Clock(), wait=True).delay_after(error, accepted=True) is None


def test_only_a_request_that_was_taken_on_comes_again() -> None:
    assert make(Clock()).delay_after(LOST, accepted=False) is None
    assert make(Clock()).delay_after(LOST, accepted=True) is not None
    assert make(Clock(), wait=True).delay_after(LOST, accepted=False) is not None
    begun = make(Clock())
    begun.progressed()
    assert begun.delay_after(LOST, accepted=False) is not None


def test_delays_grow_to_a_second_and_begin_anew_with_progress() -> None:
    clock = Clock()
    resumption = make(clock, resume_timeout_s=1000)
    delays = [resumption.delay_after(LOST, accepted=True) or 0.0 for _ in range(10)]
    assert 0.025 <= delays[0] <= 0.05
    assert all(0.5 <= delay <= 1.0 for delay in delays[5:])
    resumption.progressed()
    assert (resumption.delay_after(LOST, accepted=True) or 0.0) <= 0.05


def test_a_loss_is_given_up_when_its_time_is_over_and_the_next_has_its_own() -> None:
    clock = Clock()
    resumption = make(clock)
    assert resumption.delay_after(LOST, accepted=True) is not None
    clock.now += 9.99
    assert resumption.delay_after(LOST, accepted=False) == pytest.approx(0.01)
    resumption.progressed()
    clock.now += 5
    assert resumption.delay_after(LOST, accepted=False) is not None
    clock.now += 10
    assert resumption.delay_after(LOST, accepted=False) is None


def test_a_full_queue_is_waited_for_on_the_way_back() -> None:
    resumption = make(Clock())
    resumption.progressed()
    resumption.delay_after(LOST, accepted=False)
    assert resumption.delay_after(OverloadedError("full", retry_after_s=3), accepted=False) == 3


def test_no_wait_leads_past_the_requests_own_time() -> None:
    clock = Clock()
    resumption = make(clock, timeout_s=2.0, wait=True)
    assert resumption.timeout_s == 2.0
    clock.now += 1.999
    assert resumption.delay_after(LOST, accepted=False) == pytest.approx(0.001)
    clock.now += 5
    assert resumption.timeout_s == 0.0


def test_the_first_request_is_the_callers_and_the_next_says_what_is_held() -> None:
    request = pb.GenerateRequest(text="pé", output={"logprobs": 0, "return_prompt_token_ids": True})
    builder = OutputBuilder(request)
    resumption = Resumption(request, builder, timeout_s=None, resume_timeout_s=1, wait_for_server=False)
    assert resumption.request() is request
    builder.add(pb.GenerateResponse(request_id="r", prompt={"seed": 3, "model_digest": "d", "token_ids": [7, 8]}))
    logprobs = [pb.TokenLogprobs(token_id=5, logprob=-0.5), pb.TokenLogprobs(token_id=6, logprob=-0.25)]
    deltas = [
        pb.SampleDelta(sample_index=1, token_ids=[5, 6], text="éé", logprobs=logprobs),
        pb.SampleDelta(sample_index=0, token_ids=[9], text="x", finish_reason=pb.FINISH_REASON_LENGTH),
    ]
    builder.add(pb.GenerateResponse(deltas=deltas))
    again = resumption.request()
    assert again == pb.GenerateRequest(
        request_id="r",
        token_ids={"ids": [7, 8]},
        output={"logprobs": 0},
        resume=pb.Resume(
            prompt_token_ids=[7, 8],
            seed=3,
            model_digest="d",
            samples=[
                pb.ResumedSample(token_ids=[9], text_byte_count=1, finish_reason=pb.FINISH_REASON_LENGTH),
                pb.ResumedSample(sample_index=1, token_ids=[5, 6], text_byte_count=4, cumulative_logprob=-0.75),
            ],
        ),
    )
    assert request.text == "pé"
