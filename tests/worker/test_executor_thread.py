from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from octavo_worker.executor_thread import ExecutorThread


@pytest.fixture
def thread() -> Iterator[ExecutorThread]:
    thread = ExecutorThread()
    yield thread
    assert thread.stop(10)


def test_jobs_run_in_order_on_one_thread(thread: ExecutorThread) -> None:
    seen: list[int] = []
    futures = [thread.submit(lambda value=value: seen.append(value) or threading.get_ident()) for value in range(50)]
    assert len({future.result(10) for future in futures}) == 1
    assert seen == list(range(50))


def test_exception_is_the_futures_and_the_thread_goes_on(thread: ExecutorThread) -> None:
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(10)
    assert thread.submit(lambda: 5).result(10) == 5


def test_busy_and_tick_tell_what_the_thread_does(thread: ExecutorThread) -> None:
    entered, leave = threading.Event(), threading.Event()
    future = thread.submit(lambda: (entered.set(), leave.wait(10)))
    assert entered.wait(10)
    hanging = thread.tick
    assert thread.busy
    thread.advance()
    assert thread.tick == hanging + 1
    leave.set()
    future.result(10)
    thread.submit(lambda: None).result(10)
    assert thread.tick > hanging + 1


def test_a_device_at_work_is_busy_and_no_progress(thread: ExecutorThread) -> None:
    thread.submit(thread.hold).result(10)
    thread.submit(thread.hold).result(10)
    thread.submit(lambda: None).result(10)
    tick = thread.tick
    assert thread.busy
    time.sleep(0.6)  # more than two of its idle ticks
    assert thread.tick <= tick + 1  # that of the last job
    thread.submit(thread.let_go).result(10)
    assert thread.busy
    thread.submit(thread.let_go).result(10)
    while thread.busy or thread.tick < tick + 4:
        time.sleep(0.05)


def test_idle_work_is_done_while_no_job_comes(thread: ExecutorThread) -> None:
    pieces, idents, is_over = 3, set(), threading.Event()

    def work() -> bool:
        nonlocal pieces
        idents.add(threading.get_ident())
        pieces -= 1
        if pieces <= 0:
            is_over.set()
        return pieces > 0

    mine = thread.submit(threading.get_ident).result(10)
    thread.when_idle = work
    assert is_over.wait(10)
    assert idents == {mine}
    assert thread.submit(lambda: 5).result(10) == 5


def test_idle_work_does_not_keep_a_job_waiting(thread: ExecutorThread) -> None:
    begun = threading.Event()
    thread.when_idle = lambda: bool(begun.set() or time.sleep(0.001) or True)  # without end
    assert begun.wait(10)
    assert [thread.submit(lambda value=value: value).result(10) for value in range(20)] == list(range(20))


def test_a_device_at_work_is_not_idle(thread: ExecutorThread) -> None:
    thread.submit(thread.hold).result(10)
    worked: list[int] = []
    thread.when_idle = lambda: bool(worked.append(1))
    time.sleep(0.6)  # more than two of its idle ticks
    assert not worked
    thread.submit(thread.let_go).result(10)
    while not worked:
        time.sleep(0.01)
