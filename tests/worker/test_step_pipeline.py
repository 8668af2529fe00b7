from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend
from octavo_worker.executor import Executor
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.models.decoder import Decoder
from octavo_worker.step import Step
from octavo_worker.step_pipeline import StepPipeline
from tests.worker.conftest import new_sequence, schedule
from tests.worker.late_device import LateDevice, make_late_executor

TIMEOUT_S = 20
PROMPT = [3, 14, 15, 92, 65]


def plan(number: int, **params: object) -> pb.StepPlan:
    """The prompt at first, then one token after the other."""
    if number == 0:
        return pb.StepPlan(
            new_sequences=[new_sequence(1, PROMPT, [0, 1, 2], **params)], scheduled=schedule((1, 0, 5, True))
        )
    return pb.StepPlan(scheduled=schedule((1, 4 + number, 1, True)))


def ignore() -> None:
    """What is done about a failure here."""


@pytest.fixture
def thread() -> Iterator[ExecutorThread]:
    thread = ExecutorThread()
    yield thread
    assert thread.stop(TIMEOUT_S)


@pytest.fixture
def device() -> LateDevice:
    device = LateDevice()
    device.waits_for_arrival = True
    return device


@pytest.fixture
def late(decoder: Decoder, backend: Backend, device: LateDevice) -> Executor:
    return make_late_executor(decoder, backend, device)


def settled(thread: ExecutorThread) -> None:
    """Returns when the jobs submitted so far are done."""
    thread.submit(lambda: None).result(TIMEOUT_S)


def test_plans_are_begun_while_the_device_is_at_earlier_ones(
    late: Executor, device: LateDevice, thread: ExecutorThread
) -> None:
    pipeline = StepPipeline(thread)
    answers = [pipeline.submit(lambda n=n: late.begin(plan(n)), ignore) for n in range(3)]
    settled(thread)
    assert device.log == ["download 0", "download 1", "download 2"]
    assert not any(answer.done() for answer in answers)
    assert thread.busy
    device.downloads[0].arrived.set()
    assert len(answers[0].result(TIMEOUT_S).token_ids) == 1
    answers.append(pipeline.submit(lambda: late.begin(plan(3)), ignore))
    settled(thread)
    assert device.log[3:] == ["download 3"]
    for download in device.downloads:
        download.arrived.set()
    assert all(len(answer.result(TIMEOUT_S).token_ids) == 1 for answer in answers)
    settled(thread)
    assert not thread.busy


def test_answers_come_in_order_where_a_later_step_waits_for_no_device(
    late: Executor, device: LateDevice, thread: ExecutorThread
) -> None:
    pipeline, order = StepPipeline(thread), []
    plans = [plan(0), pb.StepPlan(), plan(1)]
    answers = []
    for number, item in enumerate(plans):
        answers.append(pipeline.submit(lambda item=item: late.begin(item), ignore))
        answers[-1].add_done_callback(lambda _, number=number: order.append(number))
    settled(thread)
    assert order == []
    device.downloads[0].arrived.set()
    answers[1].result(TIMEOUT_S)
    assert order == [0, 1]
    device.downloads[1].arrived.set()
    answers[2].result(TIMEOUT_S)
    assert order == [0, 1, 2]


def test_a_plan_that_fails_is_answered_behind_the_earlier_ones(
    late: Executor, device: LateDevice, thread: ExecutorThread
) -> None:
    pipeline, order = StepPipeline(thread), []

    def fail() -> Step:
        raise ValueError("no such plan")

    good = pipeline.submit(lambda: late.begin(plan(0)), lambda: order.append("good failed"))
    good.add_done_callback(lambda _: order.append("good"))
    bad = pipeline.submit(fail, lambda: order.append("bad failed"))
    bad.add_done_callback(lambda _: order.append("bad"))
    with pytest.raises(ValueError, match="no such plan"):
        bad.result(TIMEOUT_S)
    assert order == ["bad failed", "good", "bad"]
    assert len(good.result().token_ids) == 1


def test_a_device_that_fails_is_told_of_before_the_next_plan_is_begun(
    late: Executor, device: LateDevice, thread: ExecutorThread
) -> None:
    pipeline, failed = StepPipeline(thread), threading.Event()
    device.has_failed = True
    answer = pipeline.submit(lambda: late.begin(plan(0)), failed.set)
    settled(thread)
    device.downloads[0].arrived.set()
    with pytest.raises(RuntimeError, match="the device is gone"):
        answer.result(TIMEOUT_S)
    assert failed.is_set()
    settled(thread)
    assert not thread.busy


def test_a_device_that_hangs_is_no_progress(late: Executor, device: LateDevice, thread: ExecutorThread) -> None:
    pipeline = StepPipeline(thread)
    answer = pipeline.submit(lambda: late.begin(plan(0)), ignore)
    settled(thread)
    tick = thread.tick
    assert not answer_within(answer, 0.6)  # more than two idle ticks
    assert thread.tick == tick
    device.downloads[0].arrived.set()
    answer.result(TIMEOUT_S)


def answer_within(answer: object, timeout_s: float) -> bool:
    """Whether an answer comes in time."""
    done = threading.Event()
    answer.add_done_callback(lambda _: done.set())  # type: ignore[attr-defined]
    return done.wait(timeout_s)


def test_on_a_device_that_computes_as_it_is_called_no_thread_waits(executor: Executor, thread: ExecutorThread) -> None:
    pipeline = StepPipeline(thread)
    answers = [pipeline.submit(lambda n=n: executor.begin(plan(n)), ignore) for n in range(3)]
    assert all(len(answer.result(TIMEOUT_S).token_ids) == 1 for answer in answers)
    assert pipeline._waiter is None
