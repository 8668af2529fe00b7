"""The one thread that touches torch: runs jobs in the order given and shows that it gets on.

The network's event loop only puts jobs in and is called back; it never waits for a step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_IDLE_TICK_S = 0.25
_PAUSE_S = 0.02  # longer than routers take between two steps


class ExecutorThread:
    """A worker thread with a queue.

    tick grows whenever a job gets on or the thread has nothing to do; it stands still only when a job hangs, or the
    device (`hold`). when_idle: has a short piece of work done that can wait, and returns whether there may be more of
    it; called from this thread while no job has come for a moment.
    """

    def __init__(self, name: str = "executor") -> None:
        self.tick = 0
        self.when_idle: Callable[[], bool] = lambda: False
        self._is_running = False
        self._num_held = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a load or a step that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a job is running, or the device is at one."""
        return self._is_running or self._num_held > 0

    def hold(self) -> None:
        """The device is at work that a later job will end; until `let_go`, having nothing to do is no getting on.
        Called from within a job, as often as `let_go`."""
        self._num_held += 1

    def let_go(self) -> None:
        """See `hold`; called from within a job."""
        self._num_held -= 1

    def post(self, job: Callable[[], None]) -> None:
        """Runs a job, which must not raise, behind those given before; nobody waits for it."""
        self._jobs.put(job)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Runs a job behind those given before. Its result or exception is the future's."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        self.post(run)
        return future

    def advance(self) -> None:
        """Tells that the running job got on; called from within it."""
        self.tick += 1

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread behind the jobs given so far. Returns whether it ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s = _PAUSE_S
        while True:
            try:
                job = self._jobs.get(timeout=wait_s)
            except queue.Empty:
                wait_s = _IDLE_TICK_S
                if not self._num_held:
                    self.tick += 1
                    if self.when_idle():
                        wait_s = 0.0
                continue
            if job is None:
                return
            self._is_running = True
            job()
            self._is_running = False
            self.tick += 1
            wait_s = _PAUSE_S
