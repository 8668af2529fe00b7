"""One simulated run: the scheduler, a worker with virtual time, callers, and everything that goes wrong between them.

Plays the part of the engine and its step loop (what is sent when, who hears of what) and of the network (what is late,
lost, repeated or misplaced). Nothing here takes real time, and nothing depends on anything but the scenario.

After each call into the scheduler the invariants are checked; each event is checked by the ledger as it comes. Whatever
is wrong raises an AssertionError.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from octavo.errors import InvalidRequestError
from octavo_router.plan import StepPlan, StepResult
from octavo_router.preemption import MOST_EVICTIONS
from octavo_router.results import BeamsFinished, Event, PromptComputed, ProtocolError, RequestFailed, TokenSampled
from octavo_router.scheduler import Scheduler
from tests.simulator.invariants import Invariants
from tests.simulator.ledger import Entry, Ledger, LedgerError
from tests.simulator.oracle import EOS_TOKEN_ID
from tests.simulator.scenario import Scenario, draw_limits
from tests.simulator.traffic import Arrival, TrafficSource, may_be_refused, must_be_refused, num_sequences
from tests.simulator.worker import SimulatedWorker, WorkerKilledError

LAST_LINES = 200

MOST_KILLS = 8
"""Of one request, until it is found out, with others that are suspected too."""


@dataclass(slots=True)
class Session:
    """The router's session with one worker, from the worker's end. unanswered: plans not executed yet, oldest first.

    is_over: the router hears no more from it in time. executes: the worker itself lives on, unheard.
    """

    epoch: int
    worker: SimulatedWorker
    unanswered: deque[StepPlan] = field(default_factory=deque)
    free_at: float = 0.0
    slow_until: float = 0.0
    is_over: bool = False
    executes: bool = True


class World:
    """Runs one scenario. counts: what happened how often; lines: the last things that happened.

    echo: print them all as they happen.
    """

    def __init__(self, scenario: Scenario, *, echo: bool = False) -> None:
        self.scenario = scenario
        self.rng = random.Random(f"world {scenario.seed}")
        self.now = 0.0
        self.num_steps = 0
        self.counts: Counter[str] = Counter()
        self.ledger = Ledger()
        self.scheduler = Scheduler(scenario.limits, eos_token_ids=frozenset({EOS_TOKEN_ID}))
        self.invariants = Invariants(self.scheduler, self.ledger)
        self._echo = echo
        self._lines: deque[tuple[float, Any]] = deque(maxlen=LAST_LINES)
        self._source = TrafficSource(scenario)
        self._failing: set[tuple[int, int]] = set()
        self._killing: dict[tuple[int, int], Entry] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._epoch = 0
        self._session: Session | None = None
        self._entries: dict[int, Entry] = {}
        self._num_tokens_seen = 0
        self._num_computed_since_token = 0

    @property
    def lines(self) -> list[str]:
        """The last things that happened, for people."""
        return [_text(at, line) for at, line in self._lines]

    def run(self) -> Counter[str]:
        """Lets everything happen until nothing is left. Returns how often what happened."""
        self._begin_session()
        self._at(0.0, self._arrive, self._source.draw(self.scheduler.limits))
        while self._events:
            self.now, _, action, values = heappop(self._events)
            action(*values)
        self.ledger.check_end()
        self._check_end()
        self.counts.update(self.invariants.totals())
        self.counts["steps"] = self.num_steps
        self.counts["tokens"] = self.ledger.num_tokens
        return self.counts

    def _at(self, time: float, action: Callable[..., None], *values: Any) -> None:
        self._num_events += 1
        heappush(self._events, (time, self._num_events, action, values))

    def _note(self, line: Any, count: str | None = None) -> None:
        self._lines.append((self.now, line))
        if self._echo:
            print(_text(self.now, line))
        if count is not None:
            self.counts[count] += 1

    @property
    def _is_closing(self) -> bool:
        """Whether the run is long enough: nobody comes any more, and nothing breaks."""
        return self.num_steps >= self.scenario.num_steps

    # Callers

    def _arrive(self, arrival: Arrival) -> None:
        if self._is_closing:
            return
        if len(self.ledger.open) >= self.scenario.traffic.most_unfinished:
            self._at(self.now + max(arrival.gap_s, self.scenario.worker.base_s), self._arrive, arrival)
            return
        self._add(arrival)
        following = self._source.draw(self.scheduler.limits)
        self._at(self.now + following.gap_s, self._arrive, following)

    def _add(self, arrival: Arrival) -> None:
        request, limits = arrival.request, self.scheduler.limits
        if arrival.is_impossible and not must_be_refused(request, limits):
            return
        try:
            group = self.scheduler.add(request, now=self.now)
        except InvalidRequestError as error:
            if not may_be_refused(request, limits):
                raise LedgerError(f"{request.request_id} was refused, though it fits: {error.message}") from None
            self._note(f"{request.request_id} refused: {error.message}", "refused")
            self._check()
            return
        if must_be_refused(request, limits):
            raise LedgerError(f"{request.request_id} was taken in, though it can never run")
        entry = self.ledger.accept(arrival, group)
        self.counts["accepted"] += 1
        self._note(lambda: f"{entry.name}: {describe(arrival)}; sequences {[s.sequence_id for s in group.sequences]}")
        if arrival.fails_at is not None:
            index, num_output = arrival.fails_at
            self._failing.add(((request.sampling.seed + index) % (1 << 64), num_output))
        if arrival.kills_at is not None:
            index, num_output = arrival.kills_at
            self._killing[((request.sampling.seed + index) % (1 << 64), num_output)] = entry
        for resumed in request.resumed:
            if resumed.finish_reason is not None:
                self.scheduler.finish(group.sequences[resumed.sample_index])
        if request.resumed:
            self.counts["resumed"] += 1
        self.invariants.follow(entry)
        self._check()
        if arrival.leaves_after_s is not None:
            self._at(self.now + arrival.leaves_after_s, self._leave, entry)
        self._wake()

    def _leave(self, entry: Entry) -> None:
        if entry.outcome is not None:
            return
        self.scheduler.cancel(entry.group)
        self.ledger.close(entry, "left")
        self._note(f"{entry.name} left", "left")
        self._check()
        self._wake()

    def _flush(self) -> None:
        """Somebody has all cached prefixes forgotten."""
        num_flushed = self.scheduler.flush_prefix_cache()
        self._note(f"{num_flushed} cached blocks flushed", "flushes")
        self._check()
        self.invariants.check_flushed()

    def _close(self) -> None:
        """It takes too long: whoever is still there leaves."""
        for entry in list(self.ledger.open.values()):
            self._leave(entry)

    def _wake(self) -> None:
        """The step loop looks for something to send: at once, or a little later, when more has come together."""
        if self.rng.random() < 0.7:
            self._send_plans()
        else:
            self._at(self.now, self._send_plans)

    # Plans

    def _send_plans(self) -> None:
        while (plan := self.scheduler.plan(self.now)) is not None:
            self._note(lambda plan=plan: describe_plan(plan))
            session = self._session
            if session is None:
                raise LedgerError(f"plan {plan.step_seq} was made without a session")
            self._check()
            self.invariants.check_plan(plan)
            self.invariants.check_turns()
            if session.executes:
                self._deliver_plan(session, plan)
        self._check()
        if self._session is not None and self.scheduler.num_requests and self.scheduler.oldest_in_flight is None:
            raise LedgerError(f"nothing is planned, though {self.scheduler.num_requests} requests wait")

    def _deliver_plan(self, session: Session, plan: StepPlan) -> None:
        worker, rng = self.scenario.worker, self.rng
        duration = (worker.base_s + worker.token_s * plan.num_tokens) * rng.expovariate(1.0)
        arrives_at = self.now + worker.network_s
        if arrives_at < session.slow_until:
            duration *= worker.slow_factor
        elif rng.random() * worker.mean_steps_to_slow < 1:
            session.slow_until = arrives_at + worker.slow_s
            self.counts["slow phases"] += 1
        session.free_at = max(session.free_at, arrives_at) + duration
        session.unanswered.append(plan)
        self._at(session.free_at, self._execute, session)

    def _execute(self, session: Session) -> None:
        """The worker has come to the end of its oldest plan."""
        if not session.executes:
            return
        plan = session.unanswered.popleft()
        is_lost = not session.is_over and self._draws_loss()
        if is_lost and self.rng.random() < 0.5:
            self._break(session, None)
            return
        try:
            result = session.worker.execute(plan)
        except WorkerKilledError as error:
            self._die(session, self._killing[error.sampling_key])
            return
        if is_lost:
            self._break(session, result)
        elif session.is_over:
            self._send_stale(result)
        else:
            self._at(self.now + self.scenario.worker.network_s, self._receive, session, result)

    # Results

    def _receive(self, session: Session, result: StepResult) -> None:
        worker = self.scenario.worker
        if session.is_over or session is not self._session:
            self._send_stale(result)
            return
        if not self._is_closing and self.rng.random() < worker.share_misplaced:
            self._misplace(session, result)
            return
        self.num_steps += 1
        oldest = self.scheduler.oldest_in_flight
        self._num_computed_since_token += oldest.num_tokens if oldest is not None else 0
        events = self.scheduler.apply(result)
        self._note(lambda: describe_result(result))
        self.invariants.accept(events)
        self._check()
        self.invariants.check_step(session.unanswered)
        if self.rng.random() < 0.8:
            self._send_plans()
            self._deliver(events)
        else:
            self._deliver(events)
            self._send_plans()
        self._check_progress()
        if self.rng.random() < self.scenario.traffic.share_flushes:
            self._flush()
        if self.num_steps == self.scenario.num_steps * 5 // 4:
            self._close()
        if self.rng.random() < worker.share_repeated:
            self._at(self.now + worker.base_s * self.rng.choice((0.0, 1.0, 100.0)), self._repeat, result)

    def _deliver(self, events: list[Event]) -> None:
        """Hands events to their callers, who may leave or find their stop string in the midst of them."""
        left: set[int] = set()
        for event in events:
            group = event.sequence.group if isinstance(event, TokenSampled) else event.group
            if group.arrival in left:
                continue
            entry = self.ledger.entry_of(event)
            if isinstance(event, RequestFailed):
                self.ledger.failed(entry, event)
                self._note(f"{entry.name} failed: {event.message}", "failed")
            elif isinstance(event, BeamsFinished):
                self.ledger.beams(entry, event.hypotheses)
                self._note(f"{entry.name} found its beams", "beam searches")
            elif isinstance(event, PromptComputed):
                self.ledger.prompt(entry, event)
                self._note(f"{entry.name} has its prompt's log-probabilities", "scored prompts")
            elif self.ledger.token(entry, event):
                self.scheduler.finish(event.sequence)
                self.counts["stop strings"] += 1
                self._check()
            if entry.outcome is None and entry.num_tokens == entry.arrival.leaves_after_tokens:
                left.add(group.arrival)
                self._leave(entry)

    def _repeat(self, result: StepResult) -> None:
        """A result comes once more, or comes from a session that is over. It must have no effect."""
        if result.epoch == self.scheduler.epoch and result.step_seq > self.scheduler.last_step_seq:
            return  # the session is not given up yet, but this message is lost
        before = self.invariants.fingerprint()
        if self.scheduler.apply(result):
            raise LedgerError(f"result {result.step_seq} of session {result.epoch} was taken in, though it was void")
        if self.invariants.fingerprint() != before:
            raise LedgerError(
                f"result {result.step_seq} of session {result.epoch} changed something, though it was void"
            )
        self.counts["void results"] += 1
        self._check()

    def _send_stale(self, result: StepResult) -> None:
        """A result of a session that is over is still on its way, perhaps for long."""
        worker = self.scenario.worker
        if self.rng.random() < worker.share_stale:
            delay = self.rng.choice((0.0, worker.reconnect_s, worker.reconnect_s + worker.base_s, 300 * worker.base_s))
            self._at(self.now + delay, self._repeat, result)

    def _misplace(self, session: Session, result: StepResult) -> None:
        """An answer comes that fits nothing. It must be refused without a trace; then the session is over."""
        wrong = self.rng.choice(
            (
                replace(result, step_seq=result.step_seq + 1),
                replace(result, sequence_ids=[*result.sequence_ids, 1 << 40], token_ids=[*result.token_ids, 2]),
            )
        )
        before = self.invariants.fingerprint()
        try:
            self.scheduler.apply(wrong)
        except ProtocolError as error:
            self._note(f"refused a result: {error}", "misplaced results")
        else:
            raise LedgerError(f"a result that does not fit was taken in: {wrong}")
        if self.invariants.fingerprint() != before:
            raise LedgerError("a result that was refused left a trace")
        self._check()
        session.is_over = True
        self._lose(session)

    # Sessions

    def _draws_loss(self) -> bool:
        mean = self.scenario.worker.mean_steps_to_loss
        return mean is not None and not self._is_closing and self.rng.random() * mean < 1

    def _break(self, session: Session, result: StepResult | None) -> None:
        """The worker dies, in the midst of a step or behind its result, or goes on and cannot be heard. The router
        finds out now or after its deadline."""
        session.is_over = True
        session.executes = result is not None and self.rng.random() < 0.5
        if result is not None:
            self._send_stale(result)
        is_hanging = self.rng.random() < self.scenario.worker.share_hanging
        self._at(
            self.now + (self.scenario.worker.base_s * self.rng.uniform(10, 300) if is_hanging else 0.0),
            self._lose,
            session,
        )
        self._note("the worker hangs" if is_hanging else "the worker is gone")

    def _die(self, session: Session, entry: Entry) -> None:
        """A request kills the worker. It may do so a few times, until it is found out."""
        if session.is_over:
            session.executes = False
            return
        entry.num_kills += 1
        self._note(f"{entry.name} kills the worker", "killed workers")
        self.counts["most kills of one request"] = max(self.counts["most kills of one request"], entry.num_kills)
        if entry.num_kills > MOST_KILLS:
            raise LedgerError(f"{entry.name} killed the worker {entry.num_kills} times, the most is {MOST_KILLS}")
        self._break(session, None)

    def _lose(self, session: Session) -> None:
        """The router gives the session up."""
        assert session is self._session
        self._session = None
        self._note(f"session {session.epoch} is over", "lost sessions")
        self._note_suspects()
        failed = self.scheduler.end_session()
        self.invariants.end_session()
        for event in failed:
            entry = self.ledger.entry_of(event)
            self.ledger.blamed(entry, event)
            self._note(f"{entry.name} is blamed: {event.message}", "blamed" if entry.num_kills else "blamed wrongly")
        self._check()
        self._at(self.now + self.scenario.worker.reconnect_s * self.rng.random(), self._begin_session)

    def _note_suspects(self) -> None:
        """Counts a death of the worker against everyone whose plans are not answered."""
        groups = {
            sequence.group.arrival
            for plan in self.scheduler.in_flight
            for sequence, _ in plan.computed
            if sequence.is_live
        }
        for arrival in groups:
            entry = self.ledger.open[arrival]
            entry.num_deaths += 1
            entry.num_deaths_alone += len(groups) == 1

    def _begin_session(self) -> None:
        limits = self.scenario.limits
        if self._epoch and self.rng.random() < self.scenario.worker.share_resized:
            other = draw_limits(self.rng, self.scenario.features)
            limits = replace(other, max_model_len=limits.max_model_len)
        self._epoch += self.rng.randint(1, 3)
        worker = SimulatedWorker(limits, self._failing, self._killing)
        self._session = Session(self._epoch, worker)
        self._note(f"session {self._epoch} begins: {limits}", "sessions")
        too_large = self.scheduler.begin_session(self._epoch, limits)
        self.invariants.begin_session(worker)
        for event in too_large:
            entry = self.ledger.entry_of(event)
            if not may_be_refused(entry.arrival.request, limits):
                raise LedgerError(f"{entry.name} was dropped from a new session, though it fits: {event.message}")
            self.ledger.close(entry, "too large")
            self._note(f"{entry.name} is too large now: {event.message}", "too large")
        for entry in self.ledger.open.values():
            if must_be_refused(entry.arrival.request, limits):
                raise LedgerError(f"{entry.name} was kept for a session that can never hold it")
        self._num_computed_since_token = 0
        self._check()
        self.invariants.check_step(())
        self._send_plans()

    # Checks

    def _check(self) -> None:
        self.invariants.check()

    def _check_progress(self) -> None:
        """Asserts that tokens come: at least one in the time in which everything could be computed four times."""
        if self.ledger.num_tokens + len(self.ledger.closed) > self._num_tokens_seen:
            self._num_tokens_seen = self.ledger.num_tokens + len(self.ledger.closed)
            self._num_computed_since_token = 0
            return
        most = 2000 + 4 * sum(
            num_sequences(entry.arrival.request)
            * (len(entry.arrival.request.prompt_token_ids) + entry.arrival.request.stopping.max_tokens)
            for entry in self.ledger.open.values()
        )
        if self._num_computed_since_token > most:
            raise LedgerError(f"{self._num_computed_since_token} tokens were computed, and none came of it")

    def _check_end(self) -> None:
        """Asserts that nothing is left anywhere."""
        self.invariants.check_end()
        for entry in self.ledger.closed:
            self._check_evictions(entry)
        if self.scenario.traffic.num_priorities == 1 and not self.scenario.worker.share_resized:
            for entry in self.ledger.closed:
                self._check_preemptions(entry)
        session = self._session
        if session is None:
            raise LedgerError("the run ended without a session")
        if session.unanswered:
            raise LedgerError(f"{len(session.unanswered)} plans were never answered")
        if session.worker.sequences:
            raise LedgerError(f"the worker still holds sequences {sorted(session.worker.sequences)}")

    def _check_evictions(self, entry: Entry) -> None:
        """Asserts that a request did not give way to arrivals again and again."""
        num_evictions = max(sequence.num_evictions for sequence in entry.group.sequences)
        if num_evictions > MOST_EVICTIONS:
            raise LedgerError(f"{entry.name} gave way {num_evictions} times, the most is {MOST_EVICTIONS}")
        if num_evictions and self.scenario.traffic.num_priorities == 1:
            raise LedgerError(f"{entry.name} gave way to its equal")

    def _check_preemptions(self, entry: Entry) -> None:
        """Asserts that a request was not preempted again and again by those before it."""
        most = self.scenario.limits.num_device_blocks.bit_length() + 2
        for sequence in entry.group.sequences:
            self.counts["most preemptions of one sequence"] = max(
                self.counts["most preemptions of one sequence"], sequence.num_preemptions
            )
            if sequence.num_preemptions > most:
                raise LedgerError(f"{entry.name} was preempted {sequence.num_preemptions} times, the most is {most}")


def _text(at: float, line: Any) -> str:
    return f"{at:10.4f}  {line() if callable(line) else line}"


def describe(arrival: Arrival) -> str:
    """A request in a line."""
    request = arrival.request
    sampling, stopping = request.sampling, request.stopping
    parts = [f"prompt {len(request.prompt_token_ids)}, max_tokens {stopping.max_tokens}, priority {request.priority}"]
    if sampling.beams is not None:
        parts.append(f"beams {sampling.beams.beam_width}")
    else:
        parts.append(f"samples of {'/'.join(str(len(sample.token_ids)) for sample in arrival.samples)} tokens")
    if request.cache_salt:
        parts.append(f"salt {request.cache_salt!r}")
    if any(arrival.held):
        parts.append(f"held {arrival.held}")
    if arrival.fails_at is not None:
        parts.append(f"fails at {arrival.fails_at}")
    if arrival.leaves_after_s is not None or arrival.leaves_after_tokens is not None:
        parts.append(f"leaves after {arrival.leaves_after_s} s or {arrival.leaves_after_tokens} tokens")
    return ", ".join(parts)


def describe_plan(plan: StepPlan) -> str:
    """A plan in a line."""
    parts = []
    if plan.release_sequence_ids:
        parts.append(f"release {plan.release_sequence_ids}")
    for name in ("swap_out", "swap_in", "copies"):
        moves = getattr(plan.moves, name)
        if moves.source_block_ids:
            pairs = zip(moves.source_block_ids, moves.target_block_ids, strict=False)
            parts.append(f"{name} " + " ".join(f"{source}>{target}" for source, target in pairs))
    parts.extend(
        f"new {new.sequence_id} ({len(new.token_ids)} tokens, blocks {list(new.block_ids)})"
        for new in plan.new_sequences
    )
    forks = plan.forks
    if forks.parent_sequence_ids:
        pairs = zip(forks.parent_sequence_ids, forks.child_sequence_ids, strict=False)
        parts.append("fork " + " ".join(f"{parent}>{child}" for parent, child in pairs) + f" blocks {forks.block_ids}")
    block_ids = iter(plan.new_block_ids)
    for sequence_id, start, count, samples, num_blocks in zip(
        plan.sequence_ids, plan.start_positions, plan.token_counts, plan.samples, plan.new_block_counts, strict=False
    ):
        new_ids = [next(block_ids, None) for _ in range(num_blocks)]
        parts.append(f"{sequence_id}@{start}+{count}{'*' if samples else ''}{new_ids or ''}")
    return f"plan {plan.step_seq}: " + ", ".join(parts)


def describe_result(result: StepResult) -> str:
    """A result in a line."""
    tokens = " ".join(f"{key}={token}" for key, token in zip(result.sequence_ids, result.token_ids, strict=False))
    errors = "".join(f" {error.sequence_id} failed" for error in result.errors)
    return f"result {result.step_seq}: {tokens or '-'}{errors}"
