"""Where the marks of a step stand in the device's queue, and what is read from them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from gpu import decoding
from gpu.decoding import WatchedRunAhead

from octavo_worker.run_ahead import RunAhead

NOTHING: Any = np.zeros(0, np.int64)


class Mark:
    """Tells when it is set."""

    queue: list[str]

    def __init__(self, _: bool) -> None:
        pass

    def set(self) -> None:
        Mark.queue.append("mark")


class Device:
    is_asynchronous = False

    def upload(self, columns: list[Any]) -> list[Any]:
        Mark.queue.append(f"upload of {len(columns)}")
        return columns


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> WatchedRunAhead:
    def begin(self: Any, *arguments: Any) -> None:
        self._device = arguments[3]

    def launch(self: Any, *_: Any) -> None:
        Mark.queue.append("the host prepares")
        assert self._device.upload([1, 2]) == [1, 2]
        self._device.upload([3])
        Mark.queue.append("the host is through")

    Mark.queue = []
    monkeypatch.setattr(decoding, "_Mark", Mark)
    monkeypatch.setattr(RunAhead, "__init__", begin)
    monkeypatch.setattr(RunAhead, "launch", launch)
    return WatchedRunAhead(None, None, None, Device(), None)


def test_a_step_begins_with_its_first_work_on_the_device(ahead: WatchedRunAhead) -> None:
    ahead.launch(None, NOTHING, NOTHING, NOTHING, NOTHING)  # type: ignore[arg-type]
    step = ["the host prepares", "upload of 2", "mark", "upload of 1", "the host is through", "mark"]
    assert Mark.queue == step
    ahead.launch(None, NOTHING, NOTHING, NOTHING, NOTHING)  # type: ignore[arg-type]
    assert Mark.queue == step * 2
    assert len(ahead.marks) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_waits_are_errors_within_the_step_alone(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with contextlib.suppress(ZeroDivisionError), decoding._without_waits(True):
        modes.append("step")
        if fails:
            raise ZeroDivisionError
    assert modes == ["error", "step", 1]
    with decoding._without_waits(False):
        pass
    assert len(modes) == 3


def test_the_idle_share_is_what_lies_between_steps(ahead: WatchedRunAhead) -> None:
    class At:
        def __init__(self, at: float) -> None:
            self.at = at

        def until(self, other: At) -> float:
            return other.at - self.at

    spans = [(0.0, 1.0), (1.5, 2.0), (1.9, 3.0), (3.0, 5.0)]  # the third begins before the second is over
    ahead.marks = [(At(begin), At(end)) for begin, end in spans]  # type: ignore[misc]
    assert ahead.idle_share() == 0.5 / 4.0
    assert ahead.idle_share() is None  # they were read
