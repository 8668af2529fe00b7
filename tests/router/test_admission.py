"""Queue limits, and the hint when to come back."""

from __future__ import annotations

import pytest

from octavo.errors import OverloadedError
from octavo_router.admission import Admission, Waiting


def test_no_limits_refuse_nobody() -> None:
    Admission(max_waiting_requests=0, max_waiting_prompt_tokens=0).check(10**9, Waiting(10**6, 10**9, 0, 0), 0.0)


def test_requests_up_to_the_limit_may_wait() -> None:
    admission = Admission(max_waiting_requests=3, max_waiting_prompt_tokens=0)
    admission.check(1, Waiting(2, 2, 0, 0), 0.0)
    with pytest.raises(OverloadedError) as caught:
        admission.check(1, Waiting(3, 3, 0, 0), 0.0)
    assert caught.value.retry_after_s == 1.0, "nothing is known of the speed yet"


def test_prompt_tokens_up_to_the_limit_may_wait_and_a_large_prompt_alone() -> None:
    admission = Admission(max_waiting_requests=0, max_waiting_prompt_tokens=100)
    admission.check(60, Waiting(1, 40, 0, 0), 0.0)
    admission.check(500, Waiting(0, 0, 0, 0), 0.0)
    with pytest.raises(OverloadedError, match="40 prompt tokens wait and this request has 61, the limit is 100"):
        admission.check(61, Waiting(1, 40, 0, 0), 0.0)


@pytest.mark.parametrize(
    ("num_started", "expected_s"),
    [(20, 5.0), (2, 50.0), (1, 60.0), (1000, 1.0), (0, 1.0)],
)
def test_the_hint_is_when_the_excess_has_left_at_the_measured_speed(num_started: int, expected_s: float) -> None:
    admission = Admission(max_waiting_requests=10, max_waiting_prompt_tokens=0)
    admission.check(1, Waiting(0, 0, 0, 0), 0.0)
    with pytest.raises(OverloadedError) as caught:
        # Within 10 s so many have started; ten must leave before another may wait.
        admission.check(1, Waiting(19, 19, num_started, num_started), 10.0)
    assert caught.value.retry_after_s == expected_s


def test_old_speed_is_forgotten() -> None:
    admission = Admission(max_waiting_requests=10, max_waiting_prompt_tokens=0)
    for second in range(100):
        # A hundred a second for a minute, then one a second.
        started = 100 * second if second < 60 else 6000 + second
        admission.check(1, Waiting(0, 0, started, started), float(second))
    with pytest.raises(OverloadedError) as caught:
        admission.check(1, Waiting(19, 19, 6100, 6100), 100.0)
    assert caught.value.retry_after_s == 10.0
    assert len(admission._samples) < 25
