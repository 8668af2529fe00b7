"""A scheduler and a fake worker side by side, stepped by hand, with a transcript of what they said to each other."""

from __future__ import annotations

from collections import deque
from typing import Any

from octavo_router.beam_search import Hypothesis
from octavo_router.limits import Limits
from octavo_router.plan import StepPlan
from octavo_router.request import Beams, FinishReason, Output, Request, ResumedSample, Sampling, Stopping
from octavo_router.results import BeamsFinished, Event, PromptComputed, RequestFailed, TokenSampled
from octavo_router.scheduler import Scheduler
from octavo_router.sequence import Sequence, SequenceGroup
from tests.router.fake_worker import EOS_TOKEN_ID, FakeWorker, expected_output

EOS = frozenset({EOS_TOKEN_ID})


def make_limits(
    *,
    block_size: int = 4,
    num_blocks: int = 100,
    max_model_len: int = 1 << 20,
    max_num_seqs: int = 8,
    max_num_tokens: int = 64,
    max_plans_in_flight: int = 2,
    enable_chunked_prefill: bool = True,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    swaps: bool = False,
) -> Limits:
    """Limits that leave room, but for those given. swaps: whether swapping is faster than computing again."""
    return Limits(
        block_size=block_size,
        num_device_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_tokens,
        max_plans_in_flight=max_plans_in_flight,
        enable_chunked_prefill=enable_chunked_prefill,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        bytes_per_block=1024,
        prefill_tokens_per_s=1000.0,
        swap_bytes_per_s=1e9 if swaps else 0.0,
    )


def make_request(
    request_id: str = "A",
    num_prompt: int = 5,
    max_tokens: int = 4,
    *,
    seed: int = 0,
    n: int = 1,
    best_of: int = 1,
    beams: Beams | None = None,
    priority: int = 0,
    min_tokens: int = 0,
    ignore_eos: bool = True,
    stop_token_ids: frozenset[int] = frozenset(),
    stop: tuple[str, ...] = (),
    include_stop_in_text: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    deadline: float | None = None,
    first_token: int = 2,
    cache_salt: str | None = None,
    tenant: str = "",
    resumed: tuple[ResumedSample, ...] = (),
) -> Request:
    """A request whose prompt begins with first_token and counts up. Without a cache_salt it finds no other's prefix."""
    return Request(
        request_id=request_id,
        prompt_token_ids=[first_token + index % 40 for index in range(num_prompt)],
        sampling=Sampling(seed=seed, n=n, best_of=max(n, best_of), beams=beams),
        stopping=Stopping(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            stop=stop,
            include_stop_in_text=include_stop_in_text,
        ),
        output=Output(logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        priority=priority,
        deadline=deadline,
        cache_salt=request_id if cache_salt is None else cache_salt,
        tenant=tenant,
        resumed=resumed,
    )


def seed_that_stops_after(num_tokens: int, **request: int) -> int:
    """A seed with which a request made by make_request(**request) samples EOS as its num_tokens-th token."""
    for seed in range(100_000):
        candidate = make_request(seed=seed, max_tokens=num_tokens + 8, ignore_eos=False, **request)  # type: ignore[arg-type]
        tokens, reason = expected_output(candidate)
        if reason is FinishReason.STOP and len(tokens) == num_tokens:
            return seed
    raise AssertionError("no such seed")


class Harness:
    """Checks the invariants after each step. num_used: what the scheduler has in tables."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, eos_token_ids=EOS, **options)
        self.groups: dict[str, SequenceGroup] = {}
        self.events: list[Event] = []
        self.lines: list[str] = []
        self.now = 0.0
        self.epoch = 0
        self.connect()

    def connect(self, limits: Limits | None = None) -> None:
        """A new worker, a new session."""
        self.limits = limits or self.limits
        self.epoch += 1
        self.worker = FakeWorker(
            block_size=self.limits.block_size,
            num_blocks=self.limits.num_device_blocks,
            num_host_blocks=self.limits.num_host_blocks,
            max_num_tokens=self.limits.max_num_batched_tokens,
        )
        self.in_flight: deque[StepPlan] = deque()
        self._take(self.scheduler.begin_session(self.epoch, self.limits))

    def disconnect(self) -> None:
        """The worker is gone with all it held."""
        self._take(self.scheduler.end_session())
        self._log("session lost")
        self.check()

    def add(self, request: Request) -> SequenceGroup:
        group = self.scheduler.add(request, now=self.now)
        self.groups[request.request_id] = group
        self._log(
            f"add {request.request_id}: prompt {len(request.prompt_token_ids)}, "
            f"max_tokens {request.stopping.max_tokens}"
        )
        self.check()
        return group

    @property
    def running(self) -> list[str]:
        """Ids of the requests in the batch, in order."""
        return list(dict.fromkeys(sequence.group.request.request_id for sequence in self.scheduler.running))

    def failure(self, request_id: str) -> str | None:
        """Why a request failed, if it did."""
        for event in self.events:
            if isinstance(event, RequestFailed) and event.group is self.groups[request_id]:
                return event.message
        return None

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(self.groups[request_id])
        self._log(f"cancel {request_id}")
        self.check()

    def send(self) -> StepPlan | None:
        """Makes one plan and puts it on its way."""
        self.now += 1
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.in_flight.append(plan)
            self._log(self._describe(plan))
        self.check()
        return plan

    def answer(self) -> list[Event]:
        """The worker executes the oldest plan on its way, and the answer is applied."""
        result = self.worker.execute(self.in_flight.popleft())
        events = self.scheduler.apply(result)
        self._log(f"  result {result.step_seq}: " + (" ".join(self._describe_event(event) for event in events) or "-"))
        dropped = set(result.sequence_ids) - {
            event.sequence.sequence_id for event in events if isinstance(event, TokenSampled)
        }
        if dropped:
            self._log(f"    dropped a token of {' '.join(self._name(sequence_id) for sequence_id in sorted(dropped))}")
        self._take(events)
        self.check()
        return events

    def step(self) -> bool:
        """Sends what may be sent, then has one plan answered. Returns whether there was one."""
        while self.send() is not None:
            pass
        if self.in_flight:
            self.answer()
            return True
        return False

    def run(self, most_steps: int = 20_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(most_steps):
            if not self.step():
                assert self.scheduler.num_requests == 0, "nothing is planned, though requests wait"
                return
        raise AssertionError(f"{self.scheduler.num_requests} requests are left after {most_steps} steps")

    def check(self) -> None:
        self.scheduler.check_integrity()
        block_size = self.limits.block_size
        for sequence in self.scheduler.running:
            assert len(sequence.block_table) * block_size - sequence.num_planned < block_size

    def output(self, request_id: str, sample_index: int = 0) -> list[int]:
        return self.groups[request_id].sequences[sample_index].output_token_ids

    def delivered(self, request_id: str, sample_index: int = 0) -> list[int]:
        """Tokens of a sample that events brought."""
        sequence = self.groups[request_id].sequences[sample_index]
        return [
            event.token_id for event in self.events if isinstance(event, TokenSampled) and event.sequence is sequence
        ]

    def hypotheses(self, request_id: str) -> list[Hypothesis]:
        """What a request's beam search found."""
        (found,) = (
            event.hypotheses
            for event in self.events
            if isinstance(event, BeamsFinished) and event.group is self.groups[request_id]
        )
        return found

    @property
    def num_used(self) -> int:
        return self.scheduler.blocks.device.num_used

    @property
    def transcript(self) -> str:
        return "\n".join(self.lines) + "\n"

    def _take(self, events: list[Event] | list[RequestFailed]) -> None:
        self.events.extend(events)

    def _log(self, line: str) -> None:
        self.lines.append(line)

    def _name(self, sequence_id: int) -> str:
        for request_id, group in self.groups.items():
            for sequence in group.sequences:
                if sequence.sequence_id == sequence_id:
                    return self._sequence_name(request_id, sequence)
        raise KeyError(sequence_id)

    @staticmethod
    def _sequence_name(request_id: str, sequence: Sequence) -> str:
        return request_id if len(sequence.group.sequences) == 1 else f"{request_id}.{sequence.sample_index}"

    def _describe(self, plan: StepPlan) -> str:
        parts = []
        if plan.release_sequence_ids:
            parts.append("release " + " ".join(self._name(sequence_id) for sequence_id in plan.release_sequence_ids))
        for new in plan.new_sequences:
            output = len(new.token_ids) - new.prompt_token_count
            table = f" [{' '.join(map(str, new.block_ids))}]" if new.block_ids else ""
            parts.append(f"new {self._name(new.sequence_id)} ({new.prompt_token_count}+{output} tokens){table}")
        parts += self._describe_moves(plan)
        block_ids = iter(plan.new_block_ids)
        for sequence_id, start, count, samples, num_blocks in zip(
            plan.sequence_ids,
            plan.start_positions,
            plan.token_counts,
            plan.samples,
            plan.new_block_counts,
            strict=True,
        ):
            blocks = " ".join(str(next(block_ids)) for _ in range(num_blocks))
            positions = f"{start}" if count == 1 else f"{start}..{start + count - 1}"
            parts.append(
                f"{self._name(sequence_id)} {positions}{'*' if samples else ''}" + (f" +[{blocks}]" if blocks else "")
            )
        return f"plan {plan.step_seq}: " + ", ".join(parts)

    def _describe_moves(self, plan: StepPlan) -> list[str]:
        moves, forks = plan.moves, plan.forks
        parts = []
        for what, columns, source_tier, target_tier in (
            ("out", moves.swap_out, "", "h"),
            ("in", moves.swap_in, "h", ""),
            ("copy", moves.copies, "", ""),
        ):
            for source, target in zip(columns.source_block_ids, columns.target_block_ids, strict=True):
                parts.append(f"{what} {source_tier}{source}->{target_tier}{target}")
        block_ids = iter(forks.block_ids)
        for parent, child, token_id, num_blocks in zip(
            forks.parent_sequence_ids, forks.child_sequence_ids, forks.token_ids, forks.block_counts, strict=True
        ):
            table = " ".join(str(next(block_ids)) for _ in range(num_blocks))
            parts.append(f"fork {self._name(parent)}->{self._name(child)} token {token_id} [{table}]")
        return parts

    def _describe_event(self, event: Event) -> str:
        if isinstance(event, RequestFailed):
            return f"{event.group.request.request_id} failed: {event.message}"
        if isinstance(event, BeamsFinished):
            best = event.hypotheses[0]
            return f"{event.group.request.request_id} found {list(best.token_ids)} ({best.finish_reason.value})"
        if isinstance(event, PromptComputed):
            return f"{event.group.request.request_id} prompt" + (" (length)" if event.is_end else "")
        name = self._sequence_name(event.sequence.group.request.request_id, event.sequence)
        end = f" ({event.finish_reason.value})" if event.finish_reason else ""
        return f"{name}={event.token_id}{end}"
