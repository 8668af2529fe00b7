"""The order in which readers get what came for them: in turns, a few in each round of the event loop.

One step brings a token for every stream. If all readers went on at once, the next step's result would wait behind the
messages of all of them. So they stand in line, first come, first served, and between any few of them the event loop
looks for results: the worker gets its plans however many read. What comes for those who still stand in line joins what
they are going to read, so that under load messages get longer, and no queue does.

What readers read is `stream.py`'s.
"""

from __future__ import annotations

import asyncio
from collections import deque

# A message takes some 50 us: so many take less than a millisecond, and a step with its plan goes between them.
READERS_PER_ROUND = 16


class FanOut:
    """The line of readers who have something to read. For one event loop."""

    def __init__(self, readers_per_round: int = READERS_PER_ROUND) -> None:
        self._readers_per_round = readers_per_round
        self._line: deque[asyncio.Future[None]] = deque()
        self._is_serving = False

    def join(self, turn: asyncio.Future[None]) -> None:
        """Puts a reader in line: `turn` is done when it is its turn. One that is cancelled takes none."""
        self._line.append(turn)
        if not self._is_serving:
            self._is_serving = True
            turn.get_loop().call_soon(self._serve)

    def _serve(self) -> None:
        num_left = self._readers_per_round
        while self._line and num_left:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                num_left -= 1
        self._is_serving = bool(self._line)
        if self._is_serving:
            asyncio.get_running_loop().call_soon(self._serve)
