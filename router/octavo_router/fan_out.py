"""The order in which readers get what came for them: in turns, a few in each round of the event loop.

One step brings a token for every stream. If all readers went on at once, the next step's result would wait behind the
messages of all of them. So they stand in line, first come, first served, and between any few of them the event loop
looks for results: the worker gets its plans however many read. What comes for those who still stand in line joins what
they are going to read, so that under load messages get longer, and no queue does.

Where tokens come faster than people read, a message for each is work for both ends that nobody sees. So a reader can be
told to wait for more: then it gets in line with what comes once an interval is over, or when twice the interval is.

What readers read is `stream.py`'s.
"""

from __future__ import annotations

import asyncio
from collections import deque

# A message takes some 50 us: so many take less than a millisecond, and a step with its plan goes between them.
READERS_PER_ROUND = 16


class FanOut:
    """The line of readers who have something to read. For one event loop.

    interval_s: the least time between two messages of one reader, but for what is urgent.
    """

    def __init__(self, interval_s: float = 0.0, readers_per_round: int = READERS_PER_ROUND) -> None:
        self.interval_s = interval_s
        self._readers_per_round = readers_per_round
        self._line: deque[asyncio.Future[None]] = deque()
        self._is_serving = False
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()  # by the time at which they wait no longer
        self._is_timed = False

    def join(self, turn: asyncio.Future[None]) -> None:
        """Puts a reader in line: `turn` is done when it is its turn. One that is cancelled takes none."""
        self._line.append(turn)
        if not self._is_serving:
            self._is_serving = True
            turn.get_loop().call_soon(self._serve)

    def join_late(self, turn: asyncio.Future[None]) -> None:
        """Puts a reader in line when twice the interval has passed, unless it joins, or is cancelled, before."""
        loop = turn.get_loop()
        self._waiting.append((loop.time() + 2 * self.interval_s, turn))
        if not self._is_timed:
            self._is_timed = True
            loop.call_at(self._waiting[0][0], self._end_waits)

    def _end_waits(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and (self._waiting[0][0] <= now or self._waiting[0][1].done()):
            _, turn = self._waiting.popleft()
            if not turn.done():
                self.join(turn)
        self._is_timed = bool(self._waiting)
        if self._is_timed:
            loop.call_at(self._waiting[0][0], self._end_waits)

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
