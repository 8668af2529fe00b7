"""Decode steps and prompts on a model, as a router orders them: two plans in flight, answers through the pipeline.

Contexts are not computed: the pool holds random numbers, and sequences are scheduled behind their prompts as if those
were in it. A step's time is that of its answer behind the one before.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from gpu.bench import Bench
from gpu.model import Served
from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.devices import Device
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.run_ahead import Launch, RunAhead
from octavo_worker.sequences import IntArray, SequenceTable
from octavo_worker.step_pipeline import StepPipeline

_IN_FLIGHT = 2
_TIMEOUT_S = 60.0
_WARM_UP_STEPS = 3


class WatchedRunAhead(RunAhead):
    """Marks where each step begins and ends in the device's queue.

    A step begins behind its first upload. What the host does before that must not count as the device's work: a mark
    that is set in an empty queue is passed at once.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.marks: list[tuple[_Mark, _Mark]] = []
        self._watched = _WatchedDevice(self._device)
        self._device = cast(Device, self._watched)

    def launch(
        self, table: SequenceTable, rows: IntArray, starts: IntArray, counts: IntArray, samples: np.ndarray
    ) -> Launch:
        begin, end = _Mark(self._device.is_asynchronous), _Mark(self._device.is_asynchronous)
        self._watched.begin = begin
        launch = super().launch(table, rows, starts, counts, samples)
        end.set()
        self.marks.append((begin, end))
        return launch

    def idle_share(self) -> float | None:
        """The share of time between the first step's end and the last one's in which the device had none to do; None
        where fewer than two steps were launched."""
        marks, self.marks = self.marks, []
        if len(marks) < 2:
            return None
        idle = sum(max(0.0, before[1].until(behind[0])) for before, behind in itertools.pairwise(marks))
        total = marks[0][1].until(marks[-1][1])
        return idle / total if total > 0 else 0.0


class _WatchedDevice:
    """A device that sets the mark it was given behind its next upload."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.begin: _Mark | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def upload(self, columns: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """See `Device.upload`."""
        uploaded = self._device.upload(columns)
        if self.begin is not None:
            self.begin.set()
            self.begin = None
        return uploaded


class _Mark:
    """A place in the device's queue, or a moment where there is none."""

    def __init__(self, is_asynchronous: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if is_asynchronous else None
        self._at = 0.0

    def set(self) -> None:
        if self._event is None:
            self._at = time.perf_counter()
        else:
            self._event.record()

    def until(self, other: _Mark) -> float:
        """Seconds."""
        if self._event is None or other._event is None:
            return other._at - self._at
        return float(self._event.elapsed_time(other._event)) / 1e3


@dataclass(frozen=True)
class Steps:
    """What some steps took. step_s: of one, the median; mean_s: the mean; idle: share of time without work on the
    device, None where steps were not put into its queue ahead."""

    step_s: float
    mean_s: float
    idle: float | None


def decode(bench: Bench, served: Served, batch: int, context: int) -> Steps | None:
    """Steps of so many sequences with so many tokens before the first. None: they do not fit into the pool."""
    plans = _plans(bench, served, batch, context, bench.sizes.steps + _WARM_UP_STEPS)
    return None if plans is None else _run(served, plans, batch)


def step_without_waits(bench: Bench, served: Served, batch: int, context: int) -> None:
    """A decode step whose launch may not wait for the device, behind a few that may. Raises RuntimeError, torch's,
    where it does, or where the steps do not fit into the pool."""
    plans = _plans(bench, served, batch, context, _WARM_UP_STEPS + 1)
    if plans is None:
        raise RuntimeError(f"{batch} sequences of {context} tokens do not fit into the pool")
    try:
        for plan in plans[:-1]:
            served.executor.execute(plan)
        with _without_waits(bench.device.is_asynchronous):
            step = served.executor.begin(plans[-1])
        step.finish()
    finally:  # for the next one
        served.executor.reset()


@contextlib.contextmanager
def _without_waits(is_asynchronous: bool) -> Iterator[None]:
    """Has torch raise RuntimeError where the host would wait for the device; nothing where there is no waiting."""
    if not is_asynchronous:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _plans(bench: Bench, served: Served, batch: int, context: int, num_steps: int) -> list[pb.StepPlan] | None:
    """Of decode steps one after the other, over a pool of random numbers; None where they do not fit into it."""
    blocks = -(-(context + num_steps + 1) // bench.sizes.block_size)
    if blocks * batch > served.pool.size.num_device_blocks:
        return None
    served.pool.device.normal_(generator=bench.generator(0))
    order = np.random.default_rng(0).permutation(served.pool.size.num_device_blocks)[: blocks * batch]
    tokens = (np.arange(context) % 1000).tolist()
    plan = pb.StepPlan(
        new_sequences=[
            pb.NewSequence(
                sequence_id=number + 1,
                prompt_token_count=context,
                token_ids=tokens,
                block_ids=order[number * blocks : (number + 1) * blocks].tolist(),
                params=pb.SequenceParams(top_p=1.0),
            )
            for number in range(batch)
        ],
        scheduled=_columns(batch, context - 1),
    )
    return [plan, *(pb.StepPlan(scheduled=_columns(batch, context - 1 + number)) for number in range(1, num_steps))]


def prefill(bench: Bench, served: Served) -> float:
    """Seconds for one prompt in one step."""
    count = bench.sizes.prefill
    times = []
    for number in range(4):
        tokens = np.random.default_rng(number).integers(0, bench.sizes.model.vocab_size, count).tolist()
        plan = pb.StepPlan(
            new_sequences=[
                pb.NewSequence(
                    sequence_id=1,
                    prompt_token_count=count,
                    token_ids=tokens,
                    block_ids=range(-(-count // bench.sizes.block_size)),
                    params=pb.SequenceParams(top_p=1.0),
                )
            ],
            scheduled=pb.ScheduledSequences(
                sequence_ids=[1], start_positions=[0], token_counts=[count], samples=[True], new_block_counts=[0]
            ),
        )
        try:
            started = time.perf_counter()
            result = served.executor.execute(plan)
            times.append(time.perf_counter() - started)
            assert len(result.token_ids) == 1, result
        finally:  # for the next one
            served.executor.reset()
    return statistics.median(times[1:])


def _columns(batch: int, position: int) -> pb.ScheduledSequences:
    return pb.ScheduledSequences(
        sequence_ids=range(1, batch + 1),
        start_positions=[position] * batch,
        token_counts=[1] * batch,
        samples=[True] * batch,
        new_block_counts=[0] * batch,
    )


def _run(served: Served, plans: list[pb.StepPlan], batch: int) -> Steps:
    """Has plans executed with two in flight and times their answers."""
    thread = ExecutorThread()
    pipeline = StepPipeline(thread)
    under_way: deque[Future[pb.StepResult]] = deque()
    arrivals: list[float] = []
    watch = served.ahead if isinstance(served.ahead, WatchedRunAhead) else None
    if watch is not None:
        watch.marks.clear()

    def receive() -> None:
        result = under_way.popleft().result(_TIMEOUT_S)
        arrivals.append(time.perf_counter())
        assert len(result.token_ids) == batch, result.errors[:1]

    try:
        for plan in plans:
            under_way.append(pipeline.submit(lambda plan=plan: served.executor.begin(plan), lambda: None))  # type: ignore[misc]
            if len(under_way) == _IN_FLIGHT:
                receive()
        while under_way:
            receive()
    finally:  # for the next one
        thread.submit(served.executor.reset).result(_TIMEOUT_S)
        thread.stop(_TIMEOUT_S)
    if watch is not None:
        del watch.marks[:_WARM_UP_STEPS]
    spans = np.diff(arrivals[_WARM_UP_STEPS - 1 :])
    return Steps(float(np.median(spans)), float(spans.mean()), watch.idle_share() if watch is not None else None)
