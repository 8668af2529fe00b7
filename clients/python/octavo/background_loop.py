"""An event loop in a thread of its own, so that synchronous code can wait for coroutines wherever it runs.

Works in a notebook or under a running event loop, where `asyncio.run` would not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

_CANCEL_TIMEOUT_S = 5.0


class BackgroundLoop:
    """Runs coroutines on its thread; `run` waits for one. Close it when done."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The coroutine's result. An interrupt (Ctrl-C) cancels it, waits until it has ended, and goes on to the
        caller.
        """
        given_up, done = threading.Event(), threading.Event()
        tasks: list[asyncio.Task[Any]] = []

        async def watched() -> _T:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            try:
                if given_up.is_set():
                    coroutine.close()
                    raise asyncio.CancelledError
                return await coroutine
            finally:
                done.set()

        # The interrupt may come at any point in here, also before the future is known: so the task is asked, not it.
        try:
            return asyncio.run_coroutine_threadsafe(watched(), self._loop).result()
        except BaseException:
            given_up.set()
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            done.wait(_CANCEL_TIMEOUT_S)
            raise

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CANCEL_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
