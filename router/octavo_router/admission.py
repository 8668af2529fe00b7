"""Whether one more request may wait, and when to come back if not.

Counts requests and prompt tokens that wait for their first step. What can never run is refused before this, by
`limits.py`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from octavo.errors import OverloadedError

WINDOW_S = 10.0
SAMPLE_S = 0.5
LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """The queue's state: what waits now, and what has left it for the batch since the router started."""

    num_requests: int
    num_prompt_tokens: int
    num_started_requests: int
    num_started_prompt_tokens: int


class Admission:
    """The queue's limits, 0 for none, and the measured speed at which it moves."""

    def __init__(self, *, max_waiting_requests: int, max_waiting_prompt_tokens: int) -> None:
        self.max_waiting_requests = max_waiting_requests
        self.max_waiting_prompt_tokens = max_waiting_prompt_tokens
        self._samples: deque[tuple[float, Waiting]] = deque()

    def check(self, num_prompt_tokens: int, waiting: Waiting, now: float) -> None:
        """Raises OverloadedError if a request with so many prompt tokens would make the queue longer than its limits.

        A request larger than the token limit is let in when nothing waits: it would never be otherwise.
        """
        self._observe(waiting, now)
        if self.max_waiting_requests and waiting.num_requests >= self.max_waiting_requests:
            excess = waiting.num_requests + 1 - self.max_waiting_requests
            raise OverloadedError(
                f"{waiting.num_requests} requests wait, the limit is {self.max_waiting_requests}; try again later",
                retry_after_s=self._retry_after_s(excess, self._rate("num_started_requests", waiting, now)),
            )
        total = waiting.num_prompt_tokens + num_prompt_tokens
        if self.max_waiting_prompt_tokens and waiting.num_requests and total > self.max_waiting_prompt_tokens:
            raise OverloadedError(
                f"{waiting.num_prompt_tokens} prompt tokens wait and this request has {num_prompt_tokens}, the limit "
                f"is {self.max_waiting_prompt_tokens}; try again later",
                retry_after_s=self._retry_after_s(
                    total - self.max_waiting_prompt_tokens, self._rate("num_started_prompt_tokens", waiting, now)
                ),
            )

    def _observe(self, waiting: Waiting, now: float) -> None:
        """Keeps a sample every half second, the oldest being the last before the window began."""
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, waiting))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()

    def _rate(self, counter: str, waiting: Waiting, now: float) -> float:
        """How fast the queue has moved lately, per second. 0: not at all, or not known yet."""
        then, sample = self._samples[0]
        grown: int = getattr(waiting, counter) - getattr(sample, counter)
        return grown / (now - then) if now > then else 0.0

    @staticmethod
    def _retry_after_s(excess: int, rate: float) -> float:
        """When the excess will have left at this rate, in whole seconds within sensible bounds."""
        if rate <= 0:
            return LEAST_RETRY_S
        return float(min(max(math.ceil(excess / rate), LEAST_RETRY_S), MOST_RETRY_S))
