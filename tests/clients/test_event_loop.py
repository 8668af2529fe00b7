from __future__ import annotations

import asyncio
import importlib.util

import pytest

from octavo import event_loop


async def loop_module() -> str:
    await asyncio.sleep(0)
    return type(asyncio.get_running_loop()).__module__


def test_programs_run_in_uvloop_where_there_is_one() -> None:
    is_there = importlib.util.find_spec("uvloop") is not None
    assert event_loop.run(loop_module()).startswith("uvloop" if is_there else "asyncio")


def test_an_error_is_the_programs() -> None:
    async def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        event_loop.run(fails())
