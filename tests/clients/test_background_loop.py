from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from octavo.background_loop import BackgroundLoop


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def test_runs_coroutines_also_under_a_running_loop() -> None:
    loop = BackgroundLoop("test")
    assert loop.run(double(4)) == 8
    loop.close()
    loop.close()


def test_errors_go_to_the_caller() -> None:
    loop = BackgroundLoop("test")

    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(fail())
    loop.close()


def test_an_interrupt_cancels_the_coroutine_and_leaves_the_loop_usable() -> None:
    loop = BackgroundLoop("test")
    ended = threading.Event()

    async def wait_forever() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        loop.run(wait_forever())
    assert ended.is_set()
    assert loop.run(double(1)) == 2
    loop.close()
