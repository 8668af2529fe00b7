"""When an executor is given up. The loop itself is tested with the engine."""

from __future__ import annotations

import pytest

from octavo_router.step_loop import StepWatch
from octavo_router.worker_client import SessionLostError


def test_silence_within_the_limit_is_no_loss() -> None:
    watch = StepWatch(10.0)
    watch.sign(100.0)
    watch.check(5, 110.0)
    with pytest.raises(SessionLostError, match=r"no progress for 10.5 s in a step of 5 tokens"):
        watch.check(5, 110.5)


def test_a_growing_tick_is_a_sign_and_a_standing_one_is_none() -> None:
    watch = StepWatch(10.0)
    watch.sign(0.0)
    watch.progress(1, 8.0)
    watch.check(5, 17.0)
    watch.progress(1, 17.0)
    with pytest.raises(SessionLostError):
        watch.check(5, 19.0)


@pytest.mark.parametrize(("num_tokens", "timeout_s"), [(1, 10.0), (512, 10.0), (1024, 20.0), (2048, 40.0)])
def test_a_large_step_gets_more_time(num_tokens: int, timeout_s: float) -> None:
    watch = StepWatch(10.0)
    watch.sign(0.0)
    watch.check(num_tokens, timeout_s)
    with pytest.raises(SessionLostError):
        watch.check(num_tokens, timeout_s + 0.1)
