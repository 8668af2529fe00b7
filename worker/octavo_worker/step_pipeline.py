"""Keeps a device busy: begins a plan as soon as it is there, and answers plans in their order when the device is done.

A thread of its own waits for the device, so that the executor's is free to begin the next plan. Where a step is over
when it has begun, as on a CPU, nothing waits and no thread is asked.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.step import Step

Answer = Future[pb.StepResult]


class StepPipeline:
    """Runs plans in an executor's thread."""

    def __init__(self, thread: ExecutorThread) -> None:
        self._thread = thread
        self._under_way: deque[tuple[Step, Answer, Callable[[], None]]] = deque()
        self._waiting: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._waiter: threading.Thread | None = None

    def submit(self, begin: Callable[[], Step], on_failure: Callable[[], None]) -> Answer:
        """Has a plan begun behind the jobs given before, and answers it.

        on_failure: called in the executor's thread, before anything else is begun, when `begin` or the step raises;
        the answer's exception is that.
        """
        answer: Answer = Future()
        answer.set_running_or_notify_cancel()  # it is answered, whoever waits
        self._thread.post(lambda: self._begin(begin, answer, on_failure))
        return answer

    def _begin(self, begin: Callable[[], Step], answer: Answer, on_failure: Callable[[], None]) -> None:
        try:
            step = begin()
        except BaseException as error:
            on_failure()
            while self._under_way:  # answers come in order
                self._finish_oldest()
            answer.set_exception(error)
            return
        self._under_way.append((step, answer, on_failure))
        self._finish_what_is_over()
        if not self._under_way or step.launch is None:
            return  # answered, or to be answered when those before it are
        self._thread.hold()
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="device-waiter", daemon=True)
            self._waiter.start()
        self._waiting.put(step)

    def _wait(self) -> None:
        """Waits for steps, oldest first, and has them finished."""
        while True:
            step = self._waiting.get()
            with contextlib.suppress(Exception):  # finishing it meets the same, in the thread that tells of it
                step.wait()
            self._thread.post(functools.partial(self._finish_held, step))

    def _finish_held(self, step: Step) -> None:
        self._thread.let_go()
        while any(step is other for other, _, _ in self._under_way):
            self._finish_oldest()
        self._finish_what_is_over()

    def _finish_what_is_over(self) -> None:
        """Answers the oldest steps, as far as that needs no waiting."""
        while self._under_way and _is_over(self._under_way[0][0]):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step, answer, on_failure = self._under_way.popleft()
        try:
            result = step.finish()
        except BaseException as error:
            on_failure()
            answer.set_exception(error)
        else:
            answer.set_result(result)


def _is_over(step: Step) -> bool:
    """Whether finishing a step does not wait; nor does it where the device has failed."""
    try:
        return step.is_over
    except RuntimeError:
        return True
