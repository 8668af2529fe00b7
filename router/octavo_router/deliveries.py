"""The requests that have not ended: each one's stream, deadline and place in the metrics.

A request comes in here once and leaves once: with its last token, by its reader, its deadline, or a failure, whichever
is first. What a step brought is handed to the streams, and one request's fault ends that request alone. Who may come
in, and what becomes of all of them when a worker is lost, is the engine's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from octavo.errors import DeadlineError, GenerationError, InternalError, OctavoError, RequestCancelledError
from octavo_router import metrics
from octavo_router.fan_out import FanOut
from octavo_router.metrics import Metrics
from octavo_router.request import FinishReason, Request
from octavo_router.results import BeamsFinished, Event, PromptComputed, TokenSampled
from octavo_router.sample import End
from octavo_router.scheduler import Scheduler
from octavo_router.sequence import SequenceGroup
from octavo_router.stream import Delivery, RequestStream
from octavo_router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Deliveries:
    """The engine's ends of all streams, for one event loop.

    scheduler: who computes them, to be set before the first request; wake: set when it has something new to plan.
    """

    scheduler: Scheduler

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        clock: Callable[[], float],
        wake: asyncio.Event,
        *,
        stream_interval_s: float,
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._wake = wake
        self._fan_out = FanOut(stream_interval_s)
        self._open: dict[int, Delivery] = {}  # by arrival
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._open)

    async def wait_for_end(self) -> None:
        """Waits until every request has ended."""
        await self._idle.wait()

    def take_in(self, request: Request, now: float) -> RequestStream:
        """Gives a request to the scheduler and opens its stream.

        Raises ResumeMismatchError for a resume that holds what the request cannot have given, InvalidRequestError for
        stop strings that cannot be looked for; the scheduler then has nothing of it.
        """
        group = self.scheduler.add(request, now=now)
        try:
            delivery = Delivery(group, self._tokenizer, self._fan_out)
        except BaseException:
            self.scheduler.cancel(group)
            raise
        self._open[group.arrival] = delivery
        self._idle.clear()
        self._metrics.accepted(len(request.prompt_token_ids))
        if request.deadline is not None:
            loop = asyncio.get_running_loop()
            self._timers[group.arrival] = loop.call_later(request.deadline - now, self._expire, delivery)
        self._end_held(delivery)
        self._wake.set()
        return RequestStream(delivery, self._cancel)

    def _end_held(self, delivery: Delivery) -> None:
        """Ends the samples of a resume that have ended with what their caller holds."""
        end: End | None = None
        for held in delivery.group.request.resumed:
            end = delivery.samples[held.sample_index].end
            if end is not None:
                self.scheduler.finish(delivery.group.sequences[held.sample_index])
        if end is not None and delivery.num_open == 0:
            self._end(delivery, end.reason)

    # Ends before the last token

    def fail_all(self, error: OctavoError) -> None:
        """Every request ends with this error."""
        for delivery in list(self._open.values()):
            self._abandon(delivery, error, metrics.FINISH_ERROR)

    def start_over(self, scheduler: Scheduler, error: OctavoError) -> None:
        """Every request ends with this error, behind the back of a scheduler that may be in any state. Another one has
        its place."""
        self.scheduler = scheduler
        for delivery in list(self._open.values()):
            delivery.fail(error)
            self._forget(delivery, metrics.FINISH_ERROR)

    def _cancel(self, delivery: Delivery) -> None:
        """The reader left."""
        self._abandon(delivery, RequestCancelledError("the request was cancelled"), metrics.FINISH_ABORT)

    def _expire(self, delivery: Delivery) -> None:
        """The deadline passed."""
        self._abandon(delivery, DeadlineError("the deadline passed before the request ended"), metrics.FINISH_DEADLINE)

    def _abandon(self, delivery: Delivery, error: OctavoError, reason: str) -> None:
        """Ends a request that has not ended; its blocks are released with the next plan sent."""
        if delivery.is_over:
            return
        self.scheduler.cancel(delivery.group)
        delivery.fail(error)
        self._forget(delivery, reason)
        self._wake.set()

    # Output

    def deliver(self, events: Sequence[Event]) -> None:
        """Hands events to their streams."""
        now = self._clock()
        num_tokens = 0
        for event in events:
            group = event.sequence.group if isinstance(event, TokenSampled) else event.group
            delivery = self._open.get(group.arrival)
            if delivery is None:
                continue  # it was cancelled after the result came
            try:
                num_tokens += self._deliver_one(delivery, event, now)
            except Exception:
                logger.exception("request %s failed on %s", group.request.request_id, type(event).__name__)
                bug = InternalError("the request failed in the router; this is a bug, see the router's log")
                self._abandon(delivery, bug, metrics.FINISH_ERROR)
        self._metrics.tokens(num_tokens)

    def _deliver_one(self, delivery: Delivery, event: Event, now: float) -> int:
        """Returns how many tokens an event brought."""
        if isinstance(event, TokenSampled):
            self._deliver_token(delivery, event, now)
            return 1
        if isinstance(event, BeamsFinished):
            return self._deliver_beams(delivery, event, now)
        if isinstance(event, PromptComputed):
            self._deliver_prompt(delivery, event, now)
        else:
            self._abandon(delivery, GenerationError(f"the request failed: {event.message}"), metrics.FINISH_ERROR)
        return 0

    def _deliver_token(self, delivery: Delivery, event: TokenSampled, now: float) -> None:
        if not delivery.has_new_tokens:
            self._note_first_token(delivery.group, now)
        reason = delivery.add(event, now)
        if reason is None:
            return
        sample = delivery.samples[event.sequence.sample_index]
        self._metrics.sample_finished(now - sample.first_token_at, sample.num_new_tokens)
        self.scheduler.finish(event.sequence)  # has no effect unless it was a stop string that ended the sample
        self._wake.set()
        if delivery.num_open == 0:
            self._end(delivery, reason)

    def _deliver_prompt(self, delivery: Delivery, event: PromptComputed, now: float) -> None:
        delivery.add_prompt(is_end=event.is_end)
        if event.is_end:
            self._note_start(delivery.group, now)
            self._end(delivery, FinishReason.LENGTH)

    def _deliver_beams(self, delivery: Delivery, event: BeamsFinished, now: float) -> int:
        """Delivers a beam search, which the scheduler has ended. Returns how many tokens that are."""
        self._note_first_token(delivery.group, now)
        delivery.add_beams(event.hypotheses)
        self._end(delivery, event.hypotheses[0].finish_reason)
        return sum(sample.num_tokens for sample in delivery.samples)

    def _note_first_token(self, group: SequenceGroup, now: float) -> None:
        self._metrics.first_token(now - group.arrived_at)
        self._note_start(group, now)

    def _note_start(self, group: SequenceGroup, now: float) -> None:
        self._metrics.started((group.started_at or now) - group.arrived_at)

    def _end(self, delivery: Delivery, reason: FinishReason) -> None:
        """Every sample of a request has ended, the last for this reason."""
        delivery.end()
        self._forget(delivery, reason.value)

    def _forget(self, delivery: Delivery, reason: str) -> None:
        """A request has ended."""
        group = delivery.group
        del self._open[group.arrival]
        if (timer := self._timers.pop(group.arrival, None)) is not None:
            timer.cancel()
        if not self._open:
            self._idle.set()
        self._metrics.request_finished(reason, self._clock() - group.arrived_at)
        group.sequences.clear()  # they and it hold each other: garbage that only a full collection would find
