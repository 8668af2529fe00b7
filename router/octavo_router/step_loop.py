"""One session's loop: plans out as long as the scheduler has some, results in, signs of life both ways.

It ends only with an error: SessionLostError when the stream is lost or the executor stands still, ProtocolError when an
answer does not fit. What comes behind that is the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from octavo_router.metrics import Metrics
from octavo_router.plan import StepResult
from octavo_router.results import Event, PlanInFlight
from octavo_router.scheduler import Scheduler
from octavo_router.worker_client import Progress, SessionLostError, WorkerSession

TOKENS_PER_STEP_TIMEOUT = 512
LONGEST_WATCH_INTERVAL_S = 1.0


class StepWatch:
    """Knows when the executor last gave a sign, and when it is time to give it up."""

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._last_sign_at = 0.0
        self._last_tick: int | None = None

    def sign(self, now: float) -> None:
        """The executor got on, or gets work after having had none."""
        self._last_sign_at = now

    def progress(self, tick: int, now: float) -> None:
        """The executor's tick was reported. One that has not grown is no sign."""
        if tick != self._last_tick:
            self._last_tick = tick
            self._last_sign_at = now

    def check(self, num_tokens: int, now: float) -> None:
        """Raises SessionLostError if a step of so many tokens is due and no sign came for too long.

        The time grows with the step: step_timeout_s is for up to 512 tokens, twice as many take twice the time.
        """
        timeout_s = self._step_timeout_s * max(1.0, num_tokens / TOKENS_PER_STEP_TIMEOUT)
        silence_s = now - self._last_sign_at
        if silence_s > timeout_s:
            raise SessionLostError(f"no progress for {silence_s:.1f} s in a step of {num_tokens} tokens")


class StepLoop:
    """Steps through one session. wake: set by whoever gives the scheduler something to plan."""

    def __init__(
        self,
        scheduler: Scheduler,
        session: WorkerSession,
        *,
        deliver: Callable[[Sequence[Event]], None],
        wake: asyncio.Event,
        metrics: Metrics,
        clock: Callable[[], float],
        lease_s: float,
        step_timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._session = session
        self._deliver = deliver
        self._wake = wake
        self._metrics = metrics
        self._clock = clock
        self._renewal_s = lease_s / 3
        self._watch = StepWatch(step_timeout_s)
        self._watch_interval_s = min(step_timeout_s / 4, LONGEST_WATCH_INTERVAL_S)
        self._after_rest: PlanInFlight | None = None  # the worker had nothing to do before it

    async def run(self) -> None:
        """Runs until the session is lost. Raises an exception group with the reason."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._send_when_woken())
            tasks.create_task(self._renew())
            tasks.create_task(self._watch_progress())

    async def _receive(self) -> None:
        async for message in self._session.messages():
            if isinstance(message, Progress):
                self._watch.progress(message.executor_tick, self._clock())
            else:
                await self._take(message)

    async def _take(self, result: StepResult) -> None:
        """Applies a result and sends the next plan; what the result brought goes to the streams behind that.

        It goes to them even where sending fails, since the scheduler has counted it as given.
        """
        now = self._clock()
        self._watch.sign(now)
        plan = self._scheduler.oldest_in_flight
        events = self._scheduler.apply(result)
        try:
            if await self._send_plans(follows=True):
                self._metrics.turnaround(self._clock() - now)
        finally:
            self._deliver(events)
        if plan is not None:
            self._metrics.step(
                num_tokens=plan.num_tokens,
                duration_s=result.duration_us / 1e6,
                idle_s=result.idle_us / 1e6,
                is_between=plan is not self._after_rest,
            )

    async def _send_when_woken(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._send_plans(follows=False)

    async def _send_plans(self, *, follows: bool) -> bool:
        """Sends what the scheduler orders. Returns whether that was anything. follows: at once on a result, so that a
        worker without a plan has not rested.
        """
        has_sent = False
        is_first = self._scheduler.oldest_in_flight is None
        while (plan := self._scheduler.plan(self._clock())) is not None:
            if is_first:
                self._watch.sign(self._clock())
                self._after_rest = None if follows else self._scheduler.oldest_in_flight
                is_first = False
            await self._session.send(plan)
            has_sent = True
        return has_sent

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renewal_s)
            await self._session.renew()

    async def _watch_progress(self) -> None:
        while True:
            await asyncio.sleep(self._watch_interval_s)
            if (plan := self._scheduler.oldest_in_flight) is not None:
                self._watch.check(plan.num_tokens, self._clock())
