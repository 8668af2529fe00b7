"""The loop between the front ends, the scheduler and the worker; the only owner of the latter two.

    submit --> scheduler --plan--> worker --result--> scheduler --plan--> worker, and only then --> text --> streams

The worker gets its next plan before anybody's text is made, so that it never waits for the clients. When the worker is
lost the engine finds it again and goes on with every request from the tokens so far: streams pause, and finish with the
same tokens. What a step computes is the scheduler's decision, how a plan travels the worker client's.

Everything runs in one event loop; no method is for other threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from octavo.config import RouterConfig
from octavo.errors import DeadlineError, InternalError, UnavailableError
from octavo.v1 import admin_pb2
from octavo.worker.v1 import worker_pb2
from octavo_router import __version__, snapshot
from octavo_router.admission import Admission, Waiting
from octavo_router.deliveries import Deliveries
from octavo_router.metrics import Metrics
from octavo_router.request import Request, Sampling
from octavo_router.results import Event, ProtocolError
from octavo_router.scheduler import Scheduler
from octavo_router.served_model import ServedModel, limits_of
from octavo_router.step_loop import StepLoop
from octavo_router.stream import RequestStream
from octavo_router.tokenizer import Tokenizer
from octavo_router.worker_client import SessionLostError, WorkerClient, backoff, wait_for_worker

logger = logging.getLogger(__name__)


class Engine:
    """Takes requests, gives streams, keeps the worker busy.

    model: the served model, once started. Times are the clock's, in seconds; request deadlines too.
    """

    model: ServedModel

    def __init__(
        self,
        config: RouterConfig,
        worker: WorkerClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        default_sampling: Sampling | None = None,
    ) -> None:
        """default_sampling: the model's own, for the front ends to read from `model`."""
        self._config = config
        self._worker = worker
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._default_sampling = default_sampling or Sampling()
        self._admission = Admission(
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_prompt_tokens=config.max_waiting_prompt_tokens,
        )
        self._started_at = clock()
        self._wake = asyncio.Event()
        self._deliveries = Deliveries(
            tokenizer, metrics, clock, self._wake, stream_interval_s=config.stream_interval_ms / 1000
        )
        self._connected = asyncio.Event()
        self._is_draining = False
        self._is_stopped = False
        self._no_worker_reason = ""
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._num_lost_sessions = 0
        self._is_session_proven = True
        self._description = worker_pb2.DescribeResponse()
        self._last_epoch = 0
        self._serving: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Connects to the worker, however long that takes, and serves from then on."""
        self._serving = asyncio.create_task(self._serve(), name="engine")
        connected = asyncio.create_task(self._connected.wait())
        try:
            await asyncio.wait({self._serving, connected}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._serving.cancel()
            raise
        finally:
            connected.cancel()
        if self._serving.done():
            await self._serving

    def begin_drain(self) -> int:
        """Refuses new requests from now on. Idempotent. Returns how many have not ended."""
        if not self._is_draining:
            logger.info("draining: %d requests have not ended", self.num_unfinished)
        self._is_draining = True
        return self.num_unfinished

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests and waits until the others have ended; those that have not after the grace time fail."""
        self.begin_drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._deliveries.wait_for_end()
        except TimeoutError:
            logger.warning("%d requests did not end within %g s of grace", self.num_unfinished, grace_s)
            self._deliveries.fail_all(
                UnavailableError("the server is stopping and the time to finish is over; try again")
            )

    async def stop(self) -> None:
        """Ends the session and the connection; requests that have not ended fail. The engine cannot be started
        again."""
        self._is_draining = self._is_stopped = True
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        self._stop_give_up_timer()
        self._deliveries.fail_all(UnavailableError("the server is stopping; try again"))
        await self._worker.close()

    # State

    @property
    def _scheduler(self) -> Scheduler:
        return self._deliveries.scheduler

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._deliveries)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused for good."""
        return self._is_draining

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served at once: there is a session, and no draining. A session behind a lost
        one is believed when it has answered, unless nobody waits for an answer."""
        is_proven = self._is_session_proven or not self.num_unfinished
        return self._connected.is_set() and is_proven and not self._is_draining

    def state(self) -> admin_pb2.GetStateResponse:
        """What the queues, the pool and the worker are like right now."""
        return admin_pb2.GetStateResponse(
            version=__version__,
            uptime_ms=int(1000 * (self._clock() - self._started_at)),
            draining=self._is_draining,
            queue=snapshot.queue_state(self._scheduler, self._config),
            workers=[
                snapshot.worker_state(
                    self._scheduler,
                    self._description,
                    address=self._worker.address,
                    model_name=self.model.names[0],
                    is_connected=self._connected.is_set(),
                    num_lost_sessions=self._num_lost_sessions,
                )
            ],
            totals=snapshot.totals(self._scheduler, self._metrics),
        )

    def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix, on both tiers; requests that run keep their blocks. Returns how many blocks
        became free.
        """
        num_blocks = self._scheduler.flush_prefix_cache()
        self._wake.set()
        return num_blocks

    def check_integrity(self) -> None:
        """Asserts the scheduler's invariants, and that it and the streams agree on who has not ended."""
        self._scheduler.check_integrity()
        assert self._scheduler.num_requests == len(self._deliveries)

    # Requests

    def submit(self, request: Request) -> RequestStream:
        """Takes in a request and gives the stream of its output.

        Raises UnavailableError while draining or without a worker for long, ContextLengthError for a request that could
        never run, OverloadedError when the queue is full, DeadlineError when its deadline has passed,
        ResumeMismatchError for a resume that holds what the request cannot have given, InvalidRequestError for stop
        strings that cannot be looked for.
        """
        now = self._clock()
        self._check_available()
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineError("the deadline passed before the request arrived")
        self._scheduler.limits.check(request)
        self._check_queue(len(request.prompt_token_ids), self._waiting())
        return self._deliveries.take_in(request, now)

    def check_room(self, num_reading: int) -> None:
        """Refuses a request before its prompt is read, for the reasons of `submit` that are known by then.

        num_reading: requests whose prompts are being read; they count as waiting, so that a flood of prompts is refused
        before it is tokenized. Raises UnavailableError and OverloadedError.
        """
        self._check_available()
        waiting = self._waiting()
        self._check_queue(0, dataclasses.replace(waiting, num_requests=waiting.num_requests + num_reading))

    def _check_queue(self, num_prompt_tokens: int, waiting: Waiting) -> None:
        self._admission.check(num_prompt_tokens, waiting, self._clock())

    def _check_available(self) -> None:
        if self._is_draining:
            raise UnavailableError("the server is stopping and takes no new requests; try another one")
        if self._no_worker_reason:
            raise UnavailableError(self._no_worker_reason)

    def _waiting(self) -> Waiting:
        scheduler = self._scheduler
        return Waiting(
            num_requests=scheduler.num_waiting_requests,
            num_prompt_tokens=scheduler.num_waiting_prompt_tokens,
            num_started_requests=scheduler.num_started_requests,
            num_started_prompt_tokens=scheduler.num_started_prompt_tokens,
        )

    # Sessions

    async def _serve(self) -> None:
        """Finds the worker and serves with it, again and again."""
        delays = backoff()
        while not self._is_stopped:
            description = await wait_for_worker(self._worker)
            if not self._adopt(description):
                await asyncio.sleep(next(delays))
                continue
            did_work = False
            try:
                await self._hold_session(description)
            except* (SessionLostError, ProtocolError) as group:
                did_work = self._end_session(str(_first(group)))
            except* Exception as group:
                logger.error("the engine failed", exc_info=group)
                # A bug may have left the scheduler in any state.
                bug = InternalError("the engine failed on a step; this is a bug, see the router's log")
                self._deliveries.start_over(self._new_scheduler(), bug)
                did_work = self._end_session("the engine failed")
            if did_work:
                delays = backoff()
            await asyncio.sleep(next(delays))

    def _adopt(self, description: worker_pb2.DescribeResponse) -> bool:
        """Takes a worker's description as the served model's. False: it is one that this router cannot serve."""
        served: ServedModel | None = getattr(self, "model", None)
        new = description.model
        if served is not None and new.tokenizer_digest != served.tokenizer_digest:
            reason = (
                f"the worker came back with another tokenizer ({_short(new.tokenizer_digest)}, was "
                f"{_short(served.tokenizer_digest)}); restart the router to serve {new.name}"
            )
            logger.error("%s", reason)
            self._give_up(reason)
            return False
        if served is not None and new.digest != served.digest:
            reason = f"the worker came back with another model ({_short(new.digest)}, was {_short(served.digest)})"
            logger.error("%s; unfinished requests fail", reason)
            self._deliveries.fail_all(UnavailableError(f"{reason}; send the request again"))
        self._description = description
        self.model = ServedModel.from_description(
            description,
            self._config,
            default_sampling=self._default_sampling,
            created_unix_s=served.created_unix_s if served is not None and new.digest == served.digest else time.time(),
        )
        if served is None:
            self._deliveries.scheduler = self._new_scheduler()
            self._metrics.watch(lambda: snapshot.gauges(self._scheduler, is_connected=self._connected.is_set()))
        return True

    async def _hold_session(self, description: worker_pb2.DescribeResponse) -> None:
        """Opens a session and steps until it is lost. Never returns."""
        scheduler = self._scheduler
        self._last_epoch = max(self._last_epoch, description.last_epoch) + 1
        async with self._worker.open_session(
            epoch=self._last_epoch, incarnation=description.incarnation, router_name=self._config.router_name
        ) as session:
            failed = scheduler.begin_session(self._last_epoch, limits_of(description, self._config))
            self._deliveries.deliver(failed)
            self._mark_connected()
            logger.info(
                "session %d with %s at %s: %s, %d blocks of %d tokens, %d requests to go on with",
                self._last_epoch,
                description.worker_name,
                self._worker.address,
                self.model.names[0],
                self.model.num_device_blocks,
                self.model.block_size,
                self.num_unfinished,
            )
            await StepLoop(
                scheduler,
                session,
                deliver=self._deliver_step,
                wake=self._wake,
                metrics=self._metrics,
                clock=self._clock,
                lease_s=description.lease_ms / 1000,
                step_timeout_s=self._config.step_timeout_s,
            ).run()

    def _mark_connected(self) -> None:
        self._connected.set()
        self._no_worker_reason = ""
        self._stop_give_up_timer()
        self._wake.set()

    def _new_scheduler(self) -> Scheduler:
        limits = limits_of(self._description, self._config)
        return Scheduler(
            limits,
            eos_token_ids=self._tokenizer.eos_token_ids,
            max_worker_failures=self._config.max_worker_failures,
        )

    def _stop_give_up_timer(self) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    def _end_session(self, reason: str) -> bool:
        """The session is lost: every request waits for the next. Returns whether this one had got anything done."""
        had_results = self._scheduler.last_step_seq > 0
        what = "the session is lost with" if self._connected.is_set() else "no session could be opened with"
        logger.warning("%s the worker at %s: %s", what, self._worker.address, reason)
        if self._connected.is_set():
            self._num_lost_sessions += 1
            self._metrics.session_lost()
            self._connected.clear()
        self._is_session_proven = False
        self._deliveries.deliver(self._scheduler.end_session())
        if self._give_up_timer is None and not self._no_worker_reason:
            timeout_s = self._config.worker_timeout_s
            # Where the worker is, is the operator's to know: the log has it.
            reason = f"no worker has answered for {timeout_s:g} s; try again later"
            self._give_up_timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up, reason)
        return had_results

    def _give_up(self, reason: str) -> None:
        """No worker that could serve came back in time: requests fail now, and new ones are refused until one is
        there."""
        self._stop_give_up_timer()
        self._no_worker_reason = reason
        self._deliveries.fail_all(UnavailableError(reason))

    def _deliver_step(self, events: Sequence[Event]) -> None:
        """Hands on what a step brought; so the worker works."""
        self._is_session_proven = True
        self._deliveries.deliver(events)


def _first(error: BaseException) -> BaseException:
    """The first of the errors that a group holds, groups within it opened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _short(digest: str) -> str:
    """A digest's beginning, enough for people to tell two apart."""
    return digest[:20]
