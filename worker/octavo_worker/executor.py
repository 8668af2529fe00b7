"""Executes plans, in the order given, and each in the fixed order: release, swap out, swap in, copy, fork, forward,
sample.

It owns the sequences, the pool and the model, and must be called from one thread. A fault of one sequence becomes a
SequenceError in the result and leaves the others alone; a plan that makes no sense as a whole raises `PlanError`; any
other exception means that the device failed. Sessions, epochs and threads are for `session` and `executor_thread`; how
steps are put into a device's queue before earlier ones are answered is `run_ahead`'s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels.backend import Backend
from octavo_worker.batch import build_batch
from octavo_worker.devices import Device, open_device
from octavo_worker.kv_pool import KVPool
from octavo_worker.models.decoder import Decoder
from octavo_worker.params import params_problem, tokens_problem
from octavo_worker.processors import LogitProcessors, SequenceProcessors
from octavo_worker.prompt_logprobs import ScoredRows, score_prompts, scored_rows
from octavo_worker.run_ahead import Launch, RunAhead
from octavo_worker.sequences import NEEDS_LOGITS, NEEDS_PROMPT_SCORES, IntArray, SequenceTable, TokenArray
from octavo_worker.step import Step
from octavo_worker.step_sampler import NOT_FINITE, RowLogits, StepSampler

if TYPE_CHECKING:
    from octavo_worker.grammar import GrammarEngine, PendingMasks

_INVALID = pb.SEQUENCE_ERROR_CODE_INVALID


class PlanError(Exception):
    """A plan contradicts itself or the worker's size; it is the router's bug, and ends the session."""


@dataclass(frozen=True)
class _Scheduled:
    """The sequences of a step that passed all checks; columns of one length."""

    sequence_ids: list[int]
    rows: IntArray
    starts: IntArray
    counts: IntArray
    samples: NDArray[np.bool_]


class Executor:
    """The state of one worker. grammars: None where sequences cannot have any; ahead: puts steps into the device's
    queue before earlier ones are answered, or None; on_progress is called whenever a step gets on.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        backend: Backend,
        *,
        max_batched_tokens: int,
        device: Device | None = None,
        ahead: RunAhead | None = None,
        grammars: GrammarEngine | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.decoder, self.pool, self.backend = decoder, pool, backend
        self._device, self._ahead = device or open_device(backend.device), ahead
        self._under_way: deque[Step] = deque()
        self._processors = LogitProcessors(decoder.num_sampled, grammars, on_progress)
        self._sampler = StepSampler(backend, self._processors)
        self._max_batched_tokens = max_batched_tokens
        self._on_progress = on_progress
        self.reset()

    def reset(self) -> None:
        """Forgets all sequences. Raises what the device says where it has failed."""
        self._device.synchronize()
        for step in self._under_way:
            step.abandon()
        self._under_way.clear()
        if self._ahead is not None:
            self._ahead.forget()
        self._ended_at = time.monotonic()
        self.table = SequenceTable()
        self._pieces: dict[int, list[TokenArray]] = {}
        self._failed: set[int] = set()
        self._errors: dict[int, pb.SequenceError] = {}

    def add_tokens(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Keeps a piece of the tokens of a sequence that a plan is going to bring."""
        self._pieces.setdefault(sequence_id, []).append(_tokens(token_ids))

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        """Does what a plan orders and answers it. Raises PlanError, after which the sequences are to be reset."""
        return self.begin(plan).finish()

    def settle(self) -> None:
        """Finishes all steps under way, so that every token is known here."""
        while self._under_way:
            self._under_way[0].finish()

    @torch.inference_mode()
    def begin(self, plan: pb.StepPlan) -> Step:
        """Does what a plan orders, or has it done by the device behind what that has to do already.

        Raises PlanError, after which the sequences are to be reset.
        """
        started = time.monotonic()
        self._errors = {}
        result = pb.StepResult(idle_us=0 if self._under_way else _microseconds(started - self._ended_at))
        self._check_scheduled(plan.scheduled)
        for sequence_id in plan.release_sequence_ids:
            self.table.remove(sequence_id)
            self._failed.discard(sequence_id)
            self._pieces.pop(sequence_id, None)
        for sequence in plan.new_sequences:
            self._put(sequence)
        if self._under_way and self._needs_tokens(plan):
            self.settle()
        result.moved_byte_count = self._move(plan)
        if plan.HasField("forks"):
            self._fork(plan.forks)
        self._on_progress()
        scheduled = self._select(plan.scheduled)
        launch = self._compute(scheduled, result) if scheduled.sequence_ids else None
        result.errors.extend(self._errors.values())
        if launch is None:
            self._end(result, started)
            return Step(result, scheduled.sequence_ids, None, lambda _: None)
        step = Step(result, scheduled.sequence_ids, launch, lambda step: self._collect(step, started))
        self._under_way.append(step)
        return step

    def _needs_tokens(self, plan: pb.StepPlan) -> bool:
        """Whether a plan can only be carried out by who knows every token."""
        scheduled = plan.scheduled
        rows = self.table.find(list(scheduled.sequence_ids))
        ends = np.array(scheduled.start_positions, np.int64) + np.array(scheduled.token_counts, np.int64)
        return (
            self._ahead is None
            or len(plan.forks.child_sequence_ids) > 0
            or not self._ahead.can_launch(self.table, rows[rows >= 0], ends[rows >= 0])
        )

    def _collect(self, step: Step, started: float) -> None:
        """Takes in what a launch sampled, when all before it were taken in."""
        while self._under_way[0] is not step:
            self._under_way[0].finish()
        launch = step.launch
        assert launch is not None
        token_ids = launch.tokens.numpy()
        self._under_way.popleft()
        sequence_ids = [step.sequence_ids[index] for index in launch.indices]
        is_held = self.table.versions[launch.rows] == launch.versions
        kept = token_ids >= 0
        for at in np.flatnonzero(~kept):
            sequence_id = sequence_ids[at]
            if sequence_id in launch.dropped:
                continue
            step.result.errors.append(_error(sequence_id, *NOT_FINITE))
            if is_held[at]:
                self._forget(sequence_id)
                for later in self._under_way:
                    if later.launch is not None:
                        later.launch.dropped.add(sequence_id)
        if launch.dropped:
            kept &= ~np.isin(sequence_ids, list(launch.dropped))
        if launch.scores is not None:
            launch.scores.fill(step.result.logprobs, kept)
        mine = kept & is_held
        self.table.tokens.replace(launch.rows[mine], launch.positions[mine], token_ids[mine].astype(np.int32))
        step.result.sequence_ids.extend([sequence_ids[at] for at in np.flatnonzero(kept)])
        step.result.token_ids.extend(token_ids[kept].tolist())
        self._end(step.result, started)

    def _end(self, result: pb.StepResult, started: float) -> None:
        """Tells how long a step took that was begun then, without the time in which the one before it was computed."""
        now = time.monotonic()
        result.duration_us = _microseconds(now - max(started, self._ended_at))
        self._ended_at = now

    def _check_scheduled(self, scheduled: pb.ScheduledSequences) -> None:
        count = len(scheduled.sequence_ids)
        for name in ("start_positions", "token_counts", "samples", "new_block_counts"):
            if len(getattr(scheduled, name)) != count:
                raise PlanError(f"scheduled.{name} has {len(getattr(scheduled, name))} entries for {count} sequences")
        if len(set(scheduled.sequence_ids)) != count:
            raise PlanError("scheduled.sequence_ids names a sequence twice")
        if sum(scheduled.new_block_counts) != len(scheduled.new_block_ids):
            raise PlanError("scheduled.new_block_ids does not have as many entries as scheduled.new_block_counts says")
        total = sum(scheduled.token_counts)
        if self._max_batched_tokens and total > self._max_batched_tokens:
            raise PlanError(f"the plan computes {total} tokens; at most {self._max_batched_tokens} were offered")

    def _put(self, sequence: pb.NewSequence) -> None:
        """Takes over a sequence's whole state."""
        sequence_id = sequence.sequence_id
        pieces = self._pieces.pop(sequence_id, [])
        tokens = np.concatenate([*pieces, _tokens(sequence.token_ids)])
        self._failed.discard(sequence_id)
        config = self.decoder.config
        problem = (
            tokens_problem(tokens, sequence.prompt_token_count, config.vocab_size, config.max_model_len)
            or params_problem(sequence.params, self.decoder.num_sampled, has_grammars=self._processors.has_grammars)
            or self._blocks_problem(np.array(sequence.block_ids, np.int64))
        )
        if problem is not None:
            self._fail(sequence_id, _INVALID, problem)
            return
        blocks = np.array(sequence.block_ids, np.int32)
        self.pool.will_use(blocks)
        processors = self._processors.prepare(sequence.params)
        self.table.put(sequence_id, tokens, blocks, sequence.prompt_token_count, sequence.params, processors)

    def _blocks_problem(self, block_ids: IntArray) -> str | None:
        bad = block_ids[block_ids >= self.pool.size.num_device_blocks]
        if len(bad):
            return f"block {int(bad[0])} does not exist; the device has {self.pool.size.num_device_blocks} blocks"
        return None

    def _move(self, plan: pb.StepPlan) -> int:
        """Swaps out, swaps in and copies blocks. Returns the bytes that went between tiers."""
        size = self.pool.size
        device, host = size.num_device_blocks, size.num_host_blocks
        moved = 0
        if plan.HasField("swap_out"):
            moved += self.pool.swap_out(*_columns(plan.swap_out, "swap_out", device, host))
        if plan.HasField("swap_in"):
            moved += self.pool.swap_in(*_columns(plan.swap_in, "swap_in", host, device))
        if plan.HasField("copies"):
            sources, targets = _columns(plan.copies, "copies", device, device)
            if np.isin(sources.numpy(), targets.numpy()).any():
                raise PlanError("copies has a block that is both source and target")
            self.pool.copy(sources, targets)
        return moved

    def _fork(self, forks: pb.Forks) -> None:
        """Starts sequences as others' copies. All parents are read before any child replaces one of them."""
        children = list(forks.child_sequence_ids)
        for name in ("parent_sequence_ids", "token_ids", "block_counts", "token_counts"):
            if len(getattr(forks, name)) != len(children):
                raise PlanError(f"forks.{name} has {len(getattr(forks, name))} entries for {len(children)} children")
        if sum(forks.block_counts) != len(forks.block_ids):
            raise PlanError("forks.block_ids does not have as many entries as forks.block_counts says")
        if len(set(children)) != len(children):
            raise PlanError("forks.child_sequence_ids names a sequence twice")
        if not children:
            return
        rows = self.table.find(list(forks.parent_sequence_ids)).tolist()
        tables = np.split(np.array(forks.block_ids, np.int64), np.cumsum(forks.block_counts)[:-1])
        born: list[tuple[int, np.void, SequenceProcessors | None, TokenArray, TokenArray]] = []
        problems: dict[int, str] = {}
        for child, parent, row, kept, token, blocks in zip(
            children, forks.parent_sequence_ids, rows, forks.token_counts, forks.token_ids, tables, strict=True
        ):
            problem = self._fork_problem(parent, row, kept, token) or self._blocks_problem(blocks)
            if problem is not None:
                problems[child] = problem
                continue
            tokens = np.append(self.table.tokens.get(row)[:kept], np.int32(token))
            params, processors = self.table.params[row].copy(), self.table.processors.get(row)
            born.append((child, params, processors, tokens, blocks.astype(np.int32)))
        for child, problem in problems.items():
            # What was planned for a sequence before its failure was known is ignored, a fork of itself too.
            if child not in self._failed:
                self._fail(child, _INVALID, problem)
        for child, params, processors, tokens, blocks in born:
            self._failed.discard(child)
            self.table.fork(params, processors, child, tokens, blocks)

    def _fork_problem(self, parent: int, row: int, kept: int, token: int) -> str | None:
        if row < 0:
            return f"the parent sequence {parent} is not known"
        known, prompt_len = int(self.table.tokens.lengths[row]), int(self.table.params["prompt_len"][row])
        if not prompt_len <= kept <= known:
            return f"{kept} tokens of sequence {parent} are to be kept; it has {known}, {prompt_len} of them its prompt"
        if token >= self.decoder.config.vocab_size:
            return f"token {token} is not in the vocabulary of {self.decoder.config.vocab_size}"
        return None

    def _select(self, scheduled: pb.ScheduledSequences) -> _Scheduled:
        """Appends the new blocks and keeps the sequences that can be computed; the others become errors."""
        ids = list(scheduled.sequence_ids)
        rows = self.table.find(ids)
        starts = np.array(scheduled.start_positions, np.int64)
        counts = np.array(scheduled.token_counts, np.int64)
        samples = np.array(scheduled.samples, np.bool_)
        ok = rows >= 0
        if not ok.all():
            for index in np.flatnonzero(~ok).tolist():
                if ids[index] not in self._failed:
                    self._fail(ids[index], _INVALID, "the sequence is not known")
        if len(scheduled.new_block_ids):
            new_blocks = np.array(scheduled.new_block_ids, np.int64)
            new_counts = np.array(scheduled.new_block_counts, np.int64)
            owners = np.repeat(np.arange(len(ids)), new_counts)
            for index in np.unique(owners[new_blocks >= self.pool.size.num_device_blocks]).tolist():
                if ok[index]:
                    self._fail(ids[index], _INVALID, self._blocks_problem(new_blocks[owners == index]) or "")
                    ok[index] = False
            kept_blocks = new_blocks[ok[owners]]
            self.pool.will_use(kept_blocks)
            self.table.blocks.append(rows[ok], new_counts[ok], kept_blocks.astype(np.int32))

        ends, known = starts + counts, self.table.tokens.lengths[rows]
        room = np.minimum(
            self.table.blocks.lengths[rows] * self.pool.layout.block_size, self.decoder.config.max_model_len
        )
        fits = (counts > 0) & (ends <= room) & np.where(samples, ends == known, ends <= known)
        if not (fits & ok).all():
            for index in np.flatnonzero(ok & ~fits).tolist():
                problem = self._extent_problem(rows[index], starts[index], ends[index], bool(samples[index]))
                self._fail(ids[index], _INVALID, problem)
            ok &= fits
            ids = [ids[index] for index in np.flatnonzero(ok)]
            rows, starts, counts, samples = rows[ok], starts[ok], counts[ok], samples[ok]
        return _Scheduled(ids, rows, starts, counts, samples)

    def _extent_problem(self, row: int, start: int, end: int, samples: bool) -> str:
        """Why a sequence's tokens from start to end cannot be computed."""
        known, max_len = self.table.tokens.lengths[row], self.decoder.config.max_model_len
        if end <= start:
            return "no token is to be computed"
        if end > known:
            return f"tokens {start} to {end} are to be computed, and {known} are known"
        if samples and end != known:
            return f"a token is to be sampled behind {end} of {known} tokens"
        if end > max_len:
            return f"{end} tokens are more than the model's {max_len}"
        return f"{end} tokens do not fit into blocks for {self.table.blocks.lengths[row] * self.pool.layout.block_size}"

    def _compute(self, scheduled: _Scheduled, result: pb.StepResult) -> Launch | None:
        """The forward pass and sampling; fills the result, or returns what the device still owes."""
        if self.pool.is_moving:
            tables = self.table.blocks
            self.pool.before_use(
                tables.gather(scheduled.rows, np.zeros_like(scheduled.rows), tables.lengths[scheduled.rows])
            )
        if self._ahead is not None and self._ahead.can_launch(
            self.table, scheduled.rows, scheduled.starts + scheduled.counts
        ):
            return self._ahead.launch(self.table, scheduled.rows, scheduled.starts, scheduled.counts, scheduled.samples)
        batch = build_batch(
            self.table,
            scheduled.rows,
            scheduled.starts,
            scheduled.counts,
            block_size=self.pool.layout.block_size,
            upload=self._device.upload,
            with_prompt_lens=self.decoder.needs_prompt_lens,
        )
        chosen = np.flatnonzero(scheduled.samples)
        last_rows = np.cumsum(scheduled.counts) - 1
        needs = self.table.needs(scheduled.rows)
        scored, wanted = None, last_rows[chosen]
        if needs & NEEDS_PROMPT_SCORES:
            scored = scored_rows(self.table, scheduled.rows, scheduled.starts, scheduled.counts)
        if scored is not None:
            wanted = np.union1d(wanted, scored.batch_rows)
        masks = self._processors.start(self.table, scheduled.rows[chosen]) if needs & NEEDS_LOGITS else None
        hidden = self.decoder.hidden(
            batch.token_ids,
            batch.attention,
            self.pool.layers,
            prompt_lens=batch.prompt_lens,
            rows=None if len(wanted) == len(batch.token_ids) else torch.from_numpy(wanted).to(self.backend.device),
            on_progress=self._on_progress,
        )
        if scored is not None:
            chosen = self._score_prompts(scheduled, scored.among(wanted), hidden, chosen, result)
        if len(chosen):
            rows = None  # what is wanted is sampled, all of it
            if scored is not None:
                rows = torch.from_numpy(np.searchsorted(wanted, last_rows[chosen])).to(self.backend.device)
            row_logits = RowLogits(lambda: self.decoder.logits(hidden, rows), lambda: self.decoder.greedy(hidden, rows))
            self._sample(scheduled, chosen, row_logits, masks, result)
        return None

    def _score_prompts(
        self, scheduled: _Scheduled, scored: ScoredRows, hidden: Tensor, chosen: IntArray, result: pb.StepResult
    ) -> IntArray:
        """Answers with log-probabilities of prompts. Returns those of `chosen` that did not fail by it."""
        found, broken = score_prompts(
            scored, lambda rows: self.decoder.logits(hidden, rows), self.backend.device, self._on_progress
        )
        for index, stretch in found.items():
            stretch.sequence_id = scheduled.sequence_ids[index]
            result.prompt_logprobs.append(stretch)
        for index in sorted(broken):
            self._fail(scheduled.sequence_ids[index], *NOT_FINITE)
        return chosen[~np.isin(chosen, list(broken))] if broken else chosen

    def _sample(
        self,
        scheduled: _Scheduled,
        chosen: IntArray,
        row_logits: RowLogits,
        masks: PendingMasks | None,
        result: pb.StepResult,
    ) -> None:
        """Samples behind the sequences in `chosen`; row_logits: of a row for each of them; masks: of their grammars."""
        rows, positions = scheduled.rows[chosen], scheduled.starts[chosen] + scheduled.counts[chosen]
        ids = [scheduled.sequence_ids[index] for index in chosen.tolist()]
        sampled = self._sampler.sample(row_logits, self.table, rows, positions, ids, masks, result)
        for index, problem in sampled.problems.items():
            self._fail(ids[index], *problem)
        kept = sampled.kept
        token_ids = sampled.token_ids.astype(np.int32)
        self.table.tokens.append_one(rows[kept], token_ids)
        result.sequence_ids.extend([ids[index] for index in kept.tolist()])
        result.token_ids.extend(token_ids.tolist())

    def _fail(self, sequence_id: int, code: pb.SequenceErrorCode, message: str) -> None:
        """Reports a sequence's failure and forgets it; whatever is planned for it is ignored until it is released."""
        self._errors[sequence_id] = _error(sequence_id, code, message)
        self._forget(sequence_id)

    def _forget(self, sequence_id: int) -> None:
        self._failed.add(sequence_id)
        self.table.remove(sequence_id)


def _microseconds(seconds: float) -> int:
    return min(int(seconds * 1e6), 0xFFFFFFFF)


def _error(sequence_id: int, code: pb.SequenceErrorCode, message: str) -> pb.SequenceError:
    return pb.SequenceError(sequence_id=sequence_id, code=code, message=message)


def _tokens(token_ids: Sequence[int]) -> TokenArray:
    """Ids as int32; one beyond 2^31 wraps to a negative number and is refused with the others out of range."""
    return np.array(token_ids, np.uint32).view(np.int32)


def _columns(moves: pb.BlockMoves, name: str, num_sources: int, num_targets: int) -> tuple[Tensor, Tensor]:
    """The columns of a plan's moves, int64. Raises PlanError when they do not fit each other or the tiers."""
    sources, targets = np.array(moves.source_block_ids, np.int64), np.array(moves.target_block_ids, np.int64)
    if len(sources) != len(targets):
        raise PlanError(f"{name} has {len(sources)} sources and {len(targets)} targets")
    if len(sources) and (sources.max() >= num_sources or targets.max() >= num_targets):
        raise PlanError(
            f"{name} names source block {int(sources.max())} of {num_sources} or "
            f"target block {int(targets.max())} of {num_targets}"
        )
    if len(np.unique(targets)) != len(targets):
        raise PlanError(f"{name} has one target twice")
    return torch.from_numpy(sources), torch.from_numpy(targets)
