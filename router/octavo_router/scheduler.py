"""Decides what each step computes. Pure: requests and results in, plans out; no I/O, no clock, no randomness.

    add(request)              a request arrives: its sequences wait
    plan(now) -> StepPlan     the next step's orders, or None when there is nothing to order
    apply(result) -> events   a step's answer: tokens, ends and failures
    finish, cancel            a stop string matched; a caller left
    end_session, begin_session   the worker was lost; another is there

What goes into a plan, and for whom, is `planner.py`'s policy; here are the requests that come and go, the plans in
flight, what their results bring, and the sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sequences

from octavo.errors import InvalidRequestError
from octavo_router import integrity
from octavo_router.batch import Batch
from octavo_router.block_manager import BlockManager
from octavo_router.counts import Counts
from octavo_router.draft import Draft
from octavo_router.limits import Limits
from octavo_router.plan import StepPlan, StepResult
from octavo_router.planner import Planner
from octavo_router.queues import RunningQueue, WaitingQueue
from octavo_router.request import Request, TokenLogprobs
from octavo_router.results import (
    BeamsFinished,
    Event,
    PlanInFlight,
    PromptComputed,
    PromptStretch,
    ProtocolError,
    RequestFailed,
    TokenSampled,
    match_candidates,
    match_prompts,
    match_tokens,
)
from octavo_router.sequence import Sequence, SequenceGroup
from octavo_router.suspects import Suspects

MAX_WORKER_FAILURES = 3


class Scheduler:
    """The queues, the blocks and the plans in flight of one worker. Built without a session: plans nothing until it
    has one."""

    def __init__(
        self, limits: Limits, *, eos_token_ids: frozenset[int], max_worker_failures: int = MAX_WORKER_FAILURES
    ) -> None:
        """max_worker_failures: deaths of the worker behind which the request that caused them fails."""
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.batch = Batch(limits)
        self.num_requests = 0
        self.num_waiting_requests = 0
        self.num_waiting_prompt_tokens = 0
        self.num_started_requests = 0
        self.num_started_prompt_tokens = 0
        self._arrival = 0
        self._next_sequence_id = 1
        self._live: dict[int, Sequence] = {}
        self._suspects = Suspects(max_worker_failures)
        self._reset(epoch=None)

    def _reset(self, epoch: int | None) -> None:
        self.batch.reset(self.limits)
        self._planner = Planner(self.batch, self.limits)
        self.epoch = epoch
        self.last_step_seq = 0
        self._next_step_seq = 1
        self._in_flight: deque[PlanInFlight] = deque()

    # State

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences that wait for a place, preempted ones among them."""
        return self.batch.waiting

    @property
    def running(self) -> RunningQueue:
        """Sequences in the batch."""
        return self.batch.running

    @property
    def blocks(self) -> BlockManager:
        """The KV memory of the present session."""
        return self.batch.blocks

    @property
    def counts(self) -> Counts:
        """What has been done since the start, over all sessions."""
        return self.batch.counts

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their blocks, however often."""
        return self.counts.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step."""
        return len(self.waiting) - self.waiting.num_preempted

    @property
    def in_flight(self) -> Sequences[PlanInFlight]:
        """The plans that are not answered, oldest first."""
        return self._in_flight

    @property
    def oldest_in_flight(self) -> PlanInFlight | None:
        """The plan that the worker answers next."""
        return self._in_flight[0] if self._in_flight else None

    # Arrivals and departures

    def add(self, request: Request, *, now: float) -> SequenceGroup:
        """Takes in a request. Raises InvalidRequestError for one that could never run; it is then not queued.

        Samples that are resumed behind their end have ended when this returns.
        """
        self.limits.check(request)
        self._arrival += 1
        group = SequenceGroup(
            request,
            arrival=self._arrival,
            first_sequence_id=self._next_sequence_id,
            eos_token_ids=self.eos_token_ids,
            now=now,
        )
        if group.beams is not None:
            self.limits.check_candidates(group.beams.search.num_candidates)
        self._next_sequence_id += len(group.sequences)
        if group.num_unfinished == 0:
            return group
        self.num_requests += 1
        self.num_waiting_requests += 1
        self.num_waiting_prompt_tokens += len(request.prompt_token_ids)
        for sequence in group.sequences:
            if sequence.is_live:
                self._live[sequence.sequence_id] = sequence
                self.waiting.add(sequence)
        return group

    def finish(self, sequence: Sequence) -> None:
        """Ends one sequence, wherever it is; its release is in the next plan. No effect on one that has ended."""
        if not sequence.is_live:
            return
        self.batch.leave(sequence)
        del self._live[sequence.sequence_id]
        group = sequence.group
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            self.num_requests -= 1
            if group.started_at is None:
                self._count_out(group)
            self.waiting.close(group)
            if self._suspects:
                self._suspects.forget(group)
                self.waiting.only = self._suspects.on_trial

    def cancel(self, group: SequenceGroup) -> None:
        """Ends every sequence of a request that has not ended."""
        for sequence in group.sequences:
            self.finish(sequence)

    def flush_prefix_cache(self) -> int:
        """Forgets all cached prefixes. Returns how many blocks became free by it, on both tiers."""
        return self.blocks.flush()

    def _count_start(self, group: SequenceGroup) -> None:
        self.num_started_requests += 1
        self.num_started_prompt_tokens += len(group.request.prompt_token_ids)
        self._count_out(group)

    def _count_out(self, group: SequenceGroup) -> None:
        """The request does not wait any more."""
        self.num_waiting_requests -= 1
        self.num_waiting_prompt_tokens -= len(group.request.prompt_token_ids)

    # Plans

    def plan(self, now: float) -> StepPlan | None:
        """Orders the next step, or returns None: no session, enough plans in flight, or nothing to order."""
        if self.epoch is None or len(self._in_flight) >= self.limits.max_plans_in_flight:
            return None
        self.blocks.begin_plan()
        draft = Draft(
            self.limits,
            now,
            num_coming=self.blocks.device.num_unsent,
            candidates=reversed(list(self.running)),
        )
        self._planner.fill(draft)
        return self._finish_draft(draft)

    def _finish_draft(self, draft: Draft) -> StepPlan | None:
        releases = self.batch.releases
        if not (draft.rows or draft.new_sequences or draft.forks or self.blocks.moves or releases):
            assert not self.blocks.device.num_unsent, "blocks were released and no plan is going to carry that"
            return None
        assert self.epoch is not None
        step_seq = self._next_step_seq
        plan = draft.plan(epoch=self.epoch, step_seq=step_seq, releases=releases, moves=self.blocks.end_plan())
        self._next_step_seq += 1
        self._in_flight.append(draft.in_flight(step_seq))
        self.batch.releases = []
        for group in draft.first_started:
            self._count_start(group)
        for sequence_id in draft.started | draft.rows.keys() if self.waiting.num_parked else ():
            sequence = self._live[sequence_id]
            if sequence.num_planned >= len(sequence.prompt_token_ids):
                self.waiting.wake(sequence_id)  # the rest of its group may share the prompt from the next plan on
        return plan

    # Results

    def apply(self, result: StepResult) -> list[Event]:
        """Takes in a step's answer and returns what became of it.

        An answer to an earlier session or one that was applied before has no effect. Raises ProtocolError for an answer
        that does not fit its plan.
        """
        if result.epoch != self.epoch or result.step_seq <= self.last_step_seq:
            return []
        if not self._in_flight or self._in_flight[0].step_seq != result.step_seq:
            raise ProtocolError(f"the worker answers step {result.step_seq}; step {self.last_step_seq + 1} is due")
        plan = self._in_flight[0]
        tokens, candidates = match_tokens(plan, result), match_candidates(plan, result)
        stretches = match_prompts(plan, result)
        self._in_flight.popleft()
        self.last_step_seq = plan.step_seq
        for sequence in plan.sampled:
            sequence.num_in_flight -= sequence.group.beams is None
        events: list[Event] = []
        for error in result.errors:
            if (failed := self._live.get(error.sequence_id)) is not None:
                events.append(self._fail(failed.group, error.message))
        for sequence, num_computed in plan.computed:
            sequence.num_plans -= 1
            if sequence.is_live:
                sequence.num_computed = num_computed
                self.batch.prefixes.publish(sequence)
        if self._suspects:
            self._suspects.computed(sequence for sequence, _ in plan.computed)
            self.waiting.only = self._suspects.on_trial
        if plan.prompts:
            events += self._accept_prompts(plan.prompts, stretches)
        for sequence, token_id, logprobs in tokens:
            if sequence.is_live:
                events.append(self._accept(sequence, token_id, logprobs))
        for sequence, beam in candidates:
            if sequence.is_live and (event := self._accept_beam(sequence, beam)) is not None:
                events.append(event)
        return events

    def _accept_prompts(
        self, computed: Sequences[tuple[Sequence, int]], stretches: Sequences[PromptStretch]
    ) -> list[PromptComputed]:
        """Collects what came of prompts, and ends the requests that are over with theirs: when the last token is
        computed, which scores no other."""
        events: list[PromptComputed] = []
        for sequence, start_position, columns in stretches:
            group, scores = sequence.group, sequence.group.prompt_scores
            is_complete = sequence.is_live and scores is not None and scores.add(start_position, columns)
            if is_complete and not group.is_prompt_only:
                events.append(PromptComputed(group, is_end=False))
        for sequence, num_computed in computed:
            group = sequence.group
            if group.is_prompt_only and sequence.is_live and num_computed == len(sequence.prompt_token_ids):
                self.finish(sequence)
                events.append(PromptComputed(group, is_end=True))
        return events

    def _accept(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenSampled:
        """Appends a token to a live sequence and ends it where that is due."""
        sequence.output_token_ids.append(token_id)
        sequence.group.charge(1)
        end = sequence.group.end_of(sequence)
        if end is None:
            return TokenSampled(sequence, token_id, logprobs)
        self.finish(sequence)
        return TokenSampled(sequence, token_id, logprobs, *end)

    def _accept_beam(
        self, sequence: Sequence, candidates: list[tuple[int, float]]
    ) -> BeamsFinished | RequestFailed | None:
        """Hands a live beam's candidates to its search, which decides once it has everybody's."""
        group = sequence.group
        assert group.beams is not None
        group.charge(1)
        if not group.beams.add(sequence.sample_index, candidates):
            return None
        try:
            group.beams.advance()
        except ValueError as error:
            return self._fail(group, str(error))
        if not group.beams.search.is_done:
            return None
        self.cancel(group)
        return BeamsFinished(group, group.beams.search.hypotheses(group.request.sampling.n))

    def _fail(self, group: SequenceGroup, message: str) -> RequestFailed:
        self.cancel(group)
        return RequestFailed(group, message)

    # Sessions

    def end_session(self) -> list[RequestFailed]:
        """The worker was lost with all it held: everyone who ran waits again, to be computed anew from the tokens so
        far. Returns the request that is held to be the cause; it has ended."""
        in_flight = {sequence: None for plan in self._in_flight for sequence, _ in plan.computed}
        convicted = self._suspects.worker_died(in_flight)
        self.batch.lose_all()
        self._reset(epoch=None)
        failed = [] if convicted is None else [self._fail(*convicted)]
        self.waiting.only = self._suspects.on_trial
        return failed

    def begin_session(self, epoch: int, limits: Limits) -> list[RequestFailed]:
        """A worker is there. Returns the requests that it could never hold; they have ended."""
        assert self.epoch is None, f"session {epoch} began before session {self.epoch} ended"
        self.limits = limits
        self._reset(epoch)
        failed = []
        for group in {sequence.group: None for sequence in sorted(self.waiting, key=lambda waiting: waiting.order)}:
            try:
                limits.check(group.request)
            except InvalidRequestError as error:
                failed.append(self._fail(group, f"the worker was replaced by a smaller one: {error.message}"))
        return failed

    # Invariants

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls. Costs O(everything): for tests and for looking into a fault."""
        integrity.check(self)
