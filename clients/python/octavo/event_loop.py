"""The event loop that Octavo's programs run in: uvloop's, which leaves more of the cores to the model, or Python's own
on systems that uvloop is not made for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    import uvloop
except ImportError:
    _new_event_loop = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a program's coroutine in a new event loop, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(main)
