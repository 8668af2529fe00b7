"""Decides what each step computes. Pure: requests and results in, plans out; no I/O, no clock, no randomness.

    add(request)              a request arrives: its sequences wait
    plan(now) -> StepPlan     the next step's orders, or None when there is nothing to order
    apply(result) -> events   a step's answer: tokens, ends and failures
    finish, cancel            a stop string matched; a caller left
    end_session, begin_session   the worker was lost; another is there

Policy
- Order is priority (lower first), then arrival, then sample. It holds for starting, for getting blocks, and, backwards,
  for giving them up. A preempted sequence keeps its place.
- A step has a budget of tokens. Decodes take theirs first, then running prefills, then waiting sequences; a prompt that
  is too long for what is left is split (chunked prefill) or, where that is switched off, waits for a step with room for
  all of it.
- Strict FIFO: when the first waiting sequence cannot start, nobody overtakes it. It starts when the pool has room for
  all its known tokens beside what running prefills still need and one spare block for each running sequence, so that it
  is not started only to be preempted.
- Blocks are taken on demand, for the tokens of the step alone. When none is left, the youngest of the lowest priority
  gives up its blocks and is computed again later. It is the last in order behind the one in need, never before, so the
  first in order always goes on. A sequence whose sampled token is not back yet is first held back until it is, then
  preempted if the need is still there.
- Each preemption doubles the spare blocks that a sequence waits for before it starts again. So one request is preempted
  at most log2(pool) + 2 times by those before it; after that it starts only when it runs alone.
- Lookahead: a decode is planned before the result that brings its token is back. It is known beforehand when max_tokens
  is reached; only a stop or end-of-sequence token makes a plan compute a token too many, which is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.errors import ContextLengthError
from octavo_router.block_manager import BlockManager
from octavo_router.limits import Limits
from octavo_router.plan import NewSequence, StepPlan, StepResult
from octavo_router.queues import RunningQueue, WaitingQueue
from octavo_router.request import FinishReason, Request, TokenLogprobs
from octavo_router.results import Event, PlanInFlight, ProtocolError, RequestFailed, TokenSampled, match_tokens
from octavo_router.sequence import Sequence, SequenceGroup, SequenceStatus


@dataclass(slots=True)
class _Draft:
    """A plan in the making.

    num_decodes_to_come: decodes that have a token set aside in the budget; num_owed: blocks that sequences lack which
    could not go on; num_coming: blocks that will be free for a later plan; candidates: who may have to give up blocks,
    last in order first; held: who is held back from this step, so that it can.
    """

    budget: int
    now: float
    num_coming: int
    candidates: Iterator[Sequence]
    num_decodes_to_come: int = 0
    num_owed: int = 0
    held: set[int] = field(default_factory=set)
    new_sequences: list[NewSequence] = field(default_factory=list)
    decodes: list[tuple[Sequence, int, int, bool, list[int]]] = field(default_factory=list)
    prefills: list[tuple[Sequence, int, int, bool, list[int]]] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Tokens of the budget that are neither taken nor set aside."""
        return self.budget - self.num_decodes_to_come


class Scheduler:
    """The queues, the blocks and the plans in flight of one worker. Built without a session: plans nothing until it
    has one."""

    def __init__(self, limits: Limits, *, eos_token_ids: frozenset[int]) -> None:
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.waiting = WaitingQueue()
        self.running = RunningQueue()
        self.num_preemptions = 0
        self.num_requests = 0
        self.num_waiting_requests = 0
        self.num_waiting_prompt_tokens = 0
        self.num_started_requests = 0
        self.num_started_prompt_tokens = 0
        self._arrival = 0
        self._next_sequence_id = 1
        self._live: dict[int, Sequence] = {}
        self._reset(epoch=None)

    def _reset(self, epoch: int | None) -> None:
        self.blocks = BlockManager(block_size=self.limits.block_size, num_device_blocks=self.limits.num_device_blocks)
        self.epoch = epoch
        self.last_step_seq = 0
        self._next_step_seq = 1
        self._in_flight: deque[PlanInFlight] = deque()
        self._releases: list[int] = []

    # Arrivals and departures

    def add(self, request: Request, *, now: float) -> SequenceGroup:
        """Takes in a request. Raises ContextLengthError for one that could never run; it is then not queued."""
        self.limits.check(request)
        self._arrival += 1
        group = SequenceGroup(
            request,
            arrival=self._arrival,
            first_sequence_id=self._next_sequence_id,
            eos_token_ids=self.eos_token_ids,
            now=now,
        )
        self._next_sequence_id += len(group.sequences)
        self.num_requests += 1
        self.num_waiting_requests += 1
        self.num_waiting_prompt_tokens += len(request.prompt_token_ids)
        for sequence in group.sequences:
            self._live[sequence.sequence_id] = sequence
            self.waiting.add(sequence)
        return group

    def finish(self, sequence: Sequence) -> None:
        """Ends one sequence, wherever it is; its release is in the next plan. No effect on one that has ended."""
        if not sequence.is_live:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._give_up_blocks(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._live[sequence.sequence_id]
        self._leave_group(sequence.group)

    def cancel(self, group: SequenceGroup) -> None:
        """Ends every sequence of a request that has not ended."""
        for sequence in group.sequences:
            self.finish(sequence)

    def _leave_group(self, group: SequenceGroup) -> None:
        group.num_unfinished -= 1
        if group.num_unfinished == 0:
            self.num_requests -= 1
            if group.started_at is None:
                self._count_out(group)

    def _count_out(self, group: SequenceGroup) -> None:
        """The request does not wait any more."""
        self.num_waiting_requests -= 1
        self.num_waiting_prompt_tokens -= len(group.request.prompt_token_ids)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step."""
        return len(self.waiting) - self.waiting.num_preempted

    # Plans

    def plan(self, now: float) -> StepPlan | None:
        """Orders the next step, or returns None: no session, enough plans in flight, or nothing to order."""
        if self.epoch is None or len(self._in_flight) >= self.limits.max_plans_in_flight:
            return None
        draft = self._begin_draft(now)
        self._continue_running(draft)
        self._start_waiting(draft)
        return self._finish_draft(draft)

    def _begin_draft(self, now: float) -> _Draft:
        self.blocks.device.begin_plan()
        return _Draft(
            budget=self.limits.max_num_batched_tokens,
            now=now,
            num_coming=self.blocks.device.num_unsent,
            candidates=reversed(list(self.running)),
        )

    def _continue_running(self, draft: _Draft) -> None:
        """Everyone in the batch goes on, oldest first, as far as budget and blocks reach."""
        unplanned = [sequence for sequence in self.running if not sequence.has_all_planned]
        draft.num_decodes_to_come = sum(sequence.is_decode for sequence in unplanned)
        for sequence in unplanned:
            draft.num_decodes_to_come -= sequence.is_decode
            if sequence.status is SequenceStatus.RUNNING and sequence.sequence_id not in draft.held:
                self._continue(draft, sequence)

    def _continue(self, draft: _Draft, sequence: Sequence) -> None:
        """Schedules what budget and free blocks allow; without a free block, sees to it that a later plan has some."""
        num_tokens = self._num_affordable(draft, sequence)
        num_fitting = self.blocks.num_tokens_within_free(sequence.block_table) - sequence.num_planned
        if num_tokens == 0:
            return
        if num_fitting <= 0:
            self._make_room(draft, sequence, num_tokens)
        else:
            self._schedule(draft, sequence, min(num_tokens, num_fitting))

    def _start_waiting(self, draft: _Draft) -> None:
        """Waiting sequences join the batch in their order, until the first that cannot."""
        has_place = len(self.running) < self.limits.max_num_running
        if draft.num_owed or not has_place or self.waiting.first is None:
            return
        num_spare = self.blocks.device.num_free - sum(
            self.blocks.num_missing(sequence.block_table, sequence.num_tokens) for sequence in self.running
        )
        while (sequence := self.waiting.first) is not None and len(self.running) < self.limits.max_num_running:
            num_tokens = self._num_affordable(draft, sequence)
            num_blocks = self.blocks.num_blocks(sequence.num_tokens)
            headroom = len(self.running) << sequence.num_preemptions
            if num_tokens == 0 or num_blocks + headroom > num_spare:
                return
            num_spare -= num_blocks
            self._start(draft, sequence)
            self._schedule(draft, sequence, num_tokens)

    def _start(self, draft: _Draft, sequence: Sequence) -> None:
        """Moves the first waiting sequence into the batch."""
        group = sequence.group
        if group.started_at is None:
            group.started_at = draft.now
            self.num_started_requests += 1
            self.num_started_prompt_tokens += len(group.request.prompt_token_ids)
            self._count_out(group)
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)
        draft.new_sequences.append(sequence.new_sequence())

    def _num_affordable(self, draft: _Draft, sequence: Sequence) -> int:
        """Tokens of the sequence that the budget has room for: all that are due, or a chunk where chunks are allowed.

        Without chunked prefill only one thing is split: tokens computed again that exceed a whole step's budget,
        because the output came on top of a prompt that did fit.
        """
        due, room = sequence.num_to_compute, draft.room
        if due <= room:
            return due
        may_split = self.limits.enable_chunked_prefill or due > self.limits.max_num_batched_tokens
        return room if may_split else 0

    def _schedule(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        """Puts a sequence's next tokens into the step. The blocks for them are free."""
        start, is_decode = sequence.num_planned, sequence.is_decode
        samples = num_tokens == sequence.num_to_compute
        block_ids = self.blocks.extend(sequence.block_table, start + num_tokens)
        sequence.num_planned += num_tokens
        sequence.num_in_flight += samples
        draft.budget -= num_tokens
        rows = draft.decodes if is_decode else draft.prefills
        rows.append((sequence, start, num_tokens, samples, block_ids))

    def _finish_draft(self, draft: _Draft) -> StepPlan | None:
        rows = draft.decodes + draft.prefills
        if not rows and not self._releases:
            return None
        self.blocks.device.end_plan()
        assert self.epoch is not None
        plan = StepPlan(
            epoch=self.epoch,
            step_seq=self._next_step_seq,
            new_sequences=draft.new_sequences,
            release_sequence_ids=self._releases,
            sequence_ids=[sequence.sequence_id for sequence, *_ in rows],
            start_positions=[start for _, start, *_ in rows],
            token_counts=[num_tokens for _, _, num_tokens, *_ in rows],
            samples=[samples for _, _, _, samples, _ in rows],
            new_block_counts=[len(block_ids) for *_, block_ids in rows],
            new_block_ids=[block_id for *_, block_ids in rows for block_id in block_ids],
        )
        sampled = [sequence for sequence, _, _, samples, _ in rows if samples]
        self._in_flight.append(PlanInFlight(plan.step_seq, self.limits.max_num_batched_tokens - draft.budget, sampled))
        self._next_step_seq += 1
        self._releases = []
        return plan

    # Preemption

    def _make_room(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        """Has the last in order give up their blocks until enough will be free for everyone who had to stop.

        Blocks given up now are free from the next plan on. Whoever has nobody behind it just waits, with its blocks.
        """
        draft.num_owed += self.blocks.num_missing(sequence.block_table, sequence.num_planned + num_tokens)
        while draft.num_owed > draft.num_coming:
            victim = next(draft.candidates, sequence)
            if victim.order <= sequence.order:
                draft.candidates = iter(())
                return
            draft.num_coming += len(victim.block_table)
            draft.held.add(victim.sequence_id)
            if victim.num_in_flight == 0:
                self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks and puts it back to where it stood among the waiting."""
        self._give_up_blocks(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_planned = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.block_table)
        self._releases.append(sequence.sequence_id)

    # Results

    @property
    def oldest_in_flight(self) -> PlanInFlight | None:
        """The plan that the worker answers next."""
        return self._in_flight[0] if self._in_flight else None

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
        tokens = match_tokens(plan, result)
        self._in_flight.popleft()
        self.last_step_seq = plan.step_seq
        for sequence in plan.sampled:
            sequence.num_in_flight -= 1
        events: list[Event] = []
        for error in result.errors:
            if (failed := self._live.get(error.sequence_id)) is not None:
                self.cancel(failed.group)
                events.append(RequestFailed(failed.group, error.message))
        events.extend(
            self._accept(sequence, token_id, logprobs) for sequence, token_id, logprobs in tokens if sequence.is_live
        )
        return events

    def _accept(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenSampled:
        """Appends a token to a live sequence and ends it where that is due."""
        group = sequence.group
        sequence.output_token_ids.append(token_id)
        if token_id in group.stop_ids:
            self.finish(sequence)
            return TokenSampled(sequence, token_id, logprobs, FinishReason.STOP, token_id)
        if len(sequence.output_token_ids) >= group.request.stopping.max_tokens:
            self.finish(sequence)
            return TokenSampled(sequence, token_id, logprobs, FinishReason.LENGTH)
        return TokenSampled(sequence, token_id, logprobs)

    # Sessions

    def end_session(self) -> None:
        """The worker was lost with all it held: everyone who ran waits again, to be computed anew from the tokens so
        far."""
        for sequence in list(self.running):
            self.running.remove(sequence)
            sequence.block_table.clear()
            sequence.num_planned = sequence.num_in_flight = 0
            sequence.status = SequenceStatus.PREEMPTED
            self.waiting.add(sequence)
        self._reset(epoch=None)

    def begin_session(self, epoch: int, limits: Limits) -> list[RequestFailed]:
        """A worker is there. Returns the requests that it could never hold; they have ended."""
        assert self.epoch is None, f"session {epoch} began before session {self.epoch} ended"
        self.limits = limits
        self._reset(epoch)
        failed = []
        for group in {sequence.group: None for sequence in sorted(self.waiting, key=lambda waiting: waiting.order)}:
            try:
                limits.check(group.request)
            except ContextLengthError as error:
                self.cancel(group)
                failed.append(RequestFailed(group, f"the worker was replaced by a smaller one: {error.message}"))
        return failed

    # Invariants

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls. Costs O(everything): for tests and for looking into a fault."""
        tables = [sequence.block_table for sequence in self.running]
        self.blocks.check_integrity(tables)
        in_flight = [id(sequence) for plan in self._in_flight for sequence in plan.sampled]
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert len(sequence.block_table) == self.blocks.num_blocks(sequence.num_planned), "a table does not fit"
            assert 0 < sequence.num_planned < sequence.num_tokens, "everything is planned, or nothing"
            assert sequence.num_in_flight == in_flight.count(id(sequence)), "tokens in flight were miscounted"
            assert len(sequence.output_token_ids) + sequence.num_in_flight <= sequence.group.request.stopping.max_tokens
        for sequence in self.waiting:
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            assert not sequence.block_table
            assert sequence.num_planned == sequence.num_in_flight == 0
        members = [*self.running, *self.waiting]
        assert {sequence.sequence_id for sequence in members} == self._live.keys()
        unstarted = {sequence.group for sequence in members if sequence.group.started_at is None}
        assert len({sequence.group for sequence in members}) == self.num_requests
        assert len(unstarted) == self.num_waiting_requests
        assert sum(len(group.request.prompt_token_ids) for group in unstarted) == self.num_waiting_prompt_tokens
        assert sum(s.status is SequenceStatus.PREEMPTED for s in self.waiting) == self.waiting.num_preempted
        assert len(self.running) <= self.limits.max_num_running
        assert len(self._in_flight) <= self.limits.max_plans_in_flight
