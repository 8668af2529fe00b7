from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo_kernels import Backend
from octavo_worker.block_ops import BlockMover


class Device:
    """Streams that only write down what was asked of them. Events are over when a test says so."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.events, self.current = log, [], "main"
        self._names = iter(("out", "in"))

    def Stream(self) -> Stream:
        return Stream(next(self._names), self)

    def Event(self) -> Event:
        self.events.append(Event(len(self.events), self))
        return self.events[-1]

    def current_stream(self) -> Stream:
        return Stream(self.current, self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Stream:
    def __init__(self, name: str, device: Device) -> None:
        self.name, self.device = name, device

    def wait_stream(self, other: Stream) -> None:
        self.device.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.device.log.append(f"{self.name} waits for move {event.number}")


class Event:
    def __init__(self, number: int, device: Device) -> None:
        self.number, self.device, self.is_over = number, device, False

    def record(self, stream: Stream) -> None:
        assert stream.name in ("out", "in")

    def query(self) -> bool:
        return self.is_over


class Copies:
    """A backend that writes down on which stream it copies."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.log: list[str] = []
        self.runtime = Device(self.log)

    def move_blocks(self, source: object, sources: object, target: object, targets: object) -> None:
        self.log.append(f"{source} to {target} on {self.runtime.current}")

    def copy_blocks(self, pool: object, sources: object, targets: object) -> None:
        self.log.append(f"copy on {self.runtime.current}")


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def backend_log(monkeypatch: pytest.MonkeyPatch) -> Copies:
    backend = Copies()
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend.runtime)
    return backend


def test_moves_run_beside_and_only_their_blocks_are_waited_for(backend_log: Copies) -> None:
    mover, log = BlockMover(backend_log), backend_log.log  # type: ignore[arg-type]
    mover.move_out("device", ids(1, 2), "host", ids(7, 8))  # type: ignore[arg-type]
    mover.move_in("host", ids(7), "device", ids(3))  # type: ignore[arg-type]
    assert log == [
        "out waits for main",
        "device to host on out",
        "in waits for main",
        "in waits for move 0",  # which writes the host's block 7
        "host to device on in",
    ]
    log.clear()
    mover.before_use(np.array([0, 4, 5]))
    assert log == []
    mover.before_use(np.array([0, 2]))
    assert log == ["main waits for move 0"]
    mover.before_use(np.array([2]))
    assert log == ["main waits for move 0"]  # once is enough
    mover.before_use(np.array([3, 2]))
    assert log == ["main waits for move 0", "main waits for move 1"]
    assert not mover.is_moving


def test_directions_run_beside_each_other_unless_they_share_a_block(backend_log: Copies) -> None:
    mover, log = BlockMover(backend_log), backend_log.log  # type: ignore[arg-type]
    mover.move_out("device", ids(1), "host", ids(7))  # type: ignore[arg-type]
    mover.move_out("device", ids(2), "host", ids(8))  # type: ignore[arg-type]
    log.clear()
    mover.move_in("host", ids(4), "device", ids(5))  # type: ignore[arg-type]
    mover.move_in("host", ids(5), "device", ids(1))  # type: ignore[arg-type]
    mover.move_out("device", ids(5), "host", ids(9))  # type: ignore[arg-type]
    mover.move_out("device", ids(6), "host", ids(10))  # type: ignore[arg-type]
    assert log == [
        "in waits for main",
        "host to device on in",
        "in waits for main",
        "in waits for move 0",  # which reads the device's block 1
        "host to device on in",
        "out waits for main",
        "out waits for move 2",  # which writes the device's block 5
        "device to host on out",
        "out waits for main",
        "device to host on out",
    ]
    log.clear()
    mover.before_use(np.array([5, 2]))
    assert log == ["main waits for move 4", "main waits for move 2"]
    assert mover.is_moving  # moves 3 and 5


def test_waiting_for_the_newest_covers_the_older(backend_log: Copies) -> None:
    mover = BlockMover(backend_log)  # type: ignore[arg-type]
    for block in range(3):
        mover.move_out("device", ids(block), "host", ids(block))  # type: ignore[arg-type]
    backend_log.log.clear()
    mover.before_use(np.array([0, 1]))
    assert backend_log.log == ["main waits for move 1"]
    mover.before_use(np.array([0, 1, 2]))
    assert backend_log.log == ["main waits for move 1", "main waits for move 2"]


def test_copies_wait_for_their_blocks(backend_log: Copies) -> None:
    mover = BlockMover(backend_log)  # type: ignore[arg-type]
    mover.move_out("device", ids(1), "host", ids(0))  # type: ignore[arg-type]
    mover.move_out("device", ids(2), "host", ids(1))  # type: ignore[arg-type]
    backend_log.log.clear()
    mover.copy("device", ids(5), ids(1))  # type: ignore[arg-type]
    mover.copy("device", ids(2), ids(6))  # type: ignore[arg-type]
    mover.copy("device", ids(2), ids(7))  # type: ignore[arg-type]
    assert backend_log.log == [
        "main waits for move 0",
        "copy on main",
        "main waits for move 1",
        "copy on main",
        "copy on main",
    ]


def test_moves_that_are_over_are_forgotten(backend_log: Copies) -> None:
    mover = BlockMover(backend_log)  # type: ignore[arg-type]
    mover.move_out("device", ids(), "host", ids())  # type: ignore[arg-type]
    assert not mover.is_moving
    assert backend_log.log == []
    mover.move_out("device", ids(1), "host", ids(0))  # type: ignore[arg-type]
    assert mover.is_moving
    backend_log.runtime.events[0].is_over = True
    assert not mover.is_moving


def test_on_a_cpu_a_move_is_over_when_the_call_returns(backend: Backend) -> None:
    mover = BlockMover(backend)
    device, host = torch.arange(24.0).view(4, 6), torch.zeros(2, 6)
    mover.move_out(device, ids(3, 1), host, ids(0, 1))
    assert host[:, 0].tolist() == [18.0, 6.0]
    assert not mover.is_moving
    mover.move_in(host, ids(0), device, ids(2))
    mover.copy(device, ids(2), ids(0))
    assert device[:, 0].tolist() == [18.0, 6.0, 18.0, 18.0]
