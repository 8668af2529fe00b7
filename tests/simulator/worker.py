"""A worker without a model, for the simulation: it keeps digests in its blocks and holds the router to the contract.

A slot of a block holds the digest of every token up to its position, as keys and values depend on all before them.
Before it samples, a sequence reads its whole block table: a slot that holds anything else than what its tokens lead to
is reported with the block and the position. Where a rule of octavo.worker.v1 is broken, ContractError says which.

Written apart from `tests/router/fake_worker.py`, so that a rule misread there is not misread here as well, and faster.
It has no clock: when it executes what is the world's business.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from octavo_router.limits import Limits
from octavo_router.plan import (
    BlockMoves,
    Candidates,
    LogprobColumns,
    NewSequence,
    PromptLogprobs,
    SequenceFailure,
    SequenceParams,
    StepPlan,
    StepResult,
)
from tests.simulator.oracle import EMPTY, VOCAB_SIZE, candidates, digests, extend, logprob, next_token

NOTHING = -1
"""What a slot holds that was never written."""

NAN = -2
"""What a step that failed leaves in its slots. Whoever reads it fails as well."""


class ContractError(AssertionError):
    """The router broke a rule of octavo.worker.v1, or a block does not hold what its reader needs."""


class WorkerKilledError(Exception):
    """A sequence's step brought the worker down. sampling_key: of that step."""

    def __init__(self, sampling_key: tuple[int, int]) -> None:
        super().__init__(f"killed by {sampling_key}")
        self.sampling_key = sampling_key


@dataclass(slots=True)
class WorkerSequence:
    """A sequence as the worker knows it. digests: the model's state behind each of its tokens."""

    token_ids: list[int]
    digests: list[int]
    num_prompt_tokens: int
    params: SequenceParams
    block_table: list[int]
    num_computed: int | None = None
    has_failed: bool = False


@dataclass(slots=True)
class Memory:
    """The blocks of one tier: a list of digests each."""

    blocks: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, num_blocks: int, block_size: int) -> Memory:
        return cls([[NOTHING] * block_size for _ in range(num_blocks)])

    def last_digest(self, block_id: int) -> int:
        """What a full block ends with, which tells all tokens up to there."""
        return self.blocks[block_id][-1]


class SimulatedWorker:
    """One incarnation: its memory and its sequences. failing: (sampling key, output tokens) of the steps that fail;
    killing: of those that bring it down."""

    def __init__(
        self, limits: Limits, failing: set[tuple[int, int]], killing: Container[tuple[int, int]] = frozenset()
    ) -> None:
        self.block_size = limits.block_size
        self.max_num_tokens = limits.max_num_batched_tokens
        self.device = Memory.of(limits.num_device_blocks, limits.block_size)
        self.host = Memory.of(limits.num_host_blocks, limits.block_size)
        self.sequences: dict[int, WorkerSequence] = {}
        self.num_plans = 0
        self._failing = failing
        self._killing = killing

    def execute(self, plan: StepPlan) -> StepResult:
        """Does what a plan orders, in the contract's order. Raises ContractError where it must not be ordered, and
        WorkerKilledError where it does not survive it."""
        self.num_plans += 1
        _require(plan.step_seq == self.num_plans, "plan %d came, %d is next", plan.step_seq, self.num_plans)
        self._check_columns(plan)
        for sequence_id in plan.release_sequence_ids:
            _require(sequence_id in self.sequences, "sequence %d is released and not known", sequence_id)
            del self.sequences[sequence_id]
        for new in plan.new_sequences:
            self._add(new)
        self._move(plan.moves.swap_out, self.device, self.host)
        self._move(plan.moves.swap_in, self.host, self.device)
        self._move(plan.moves.copies, self.device, self.device)
        self._fork(plan)
        return self._forward(plan)

    def _check_columns(self, plan: StepPlan) -> None:
        count = len(plan.sequence_ids)
        for column in (plan.start_positions, plan.token_counts, plan.samples, plan.new_block_counts):
            _require(len(column) == count, "columns differ in length")
        _require(len(set(plan.sequence_ids)) == count, "a sequence is scheduled twice")
        _require(sum(plan.new_block_counts) == len(plan.new_block_ids), "new blocks are miscounted")
        _require(sum(plan.token_counts) <= self.max_num_tokens, "%d tokens are over the limit", sum(plan.token_counts))
        orders = (plan.sequence_ids, plan.release_sequence_ids, plan.new_sequences, plan.moves, plan.forks)
        _require(any(len(order) for order in orders), "a plan orders nothing")

    @staticmethod
    def _move(moves: BlockMoves, source: Memory, target: Memory) -> None:
        sources, targets = moves.source_block_ids, moves.target_block_ids
        _require(len(sources) == len(targets), "a move has columns of two lengths")
        if not sources:
            return
        _require(len(set(targets)) == len(targets), "a block is the target of two moves")
        _require(source is not target or not set(sources) & set(targets), "a block is copied from and to in one plan")
        for source_id, target_id in zip(sources, targets, strict=True):
            _require(0 <= source_id < len(source.blocks), "there is no block %d to move", source_id)
            _require(0 <= target_id < len(target.blocks), "there is no block %d to move to", target_id)
            target.blocks[target_id] = list(source.blocks[source_id])

    # Sequences

    def _add(self, new: NewSequence) -> None:
        _require(0 < new.prompt_token_count <= len(new.token_ids), "a prompt's length is wrong")
        token_ids = list(new.token_ids)
        self.sequences[new.sequence_id] = WorkerSequence(
            token_ids, digests(token_ids), new.prompt_token_count, new.params, list(new.block_ids)
        )

    def _fork(self, plan: StepPlan) -> None:
        """All children take from the parents as they were before any fork of the plan."""
        forks = plan.forks
        if not forks.parent_sequence_ids:
            return
        block_ids = iter(forks.block_ids)
        children: dict[int, WorkerSequence] = {}
        for parent_id, child_id, token_id, block_count, token_count in zip(
            forks.parent_sequence_ids,
            forks.child_sequence_ids,
            forks.token_ids,
            forks.block_counts,
            forks.token_counts,
            strict=True,
        ):
            _require(parent_id in self.sequences, "sequence %d is forked and not known", parent_id)
            _require(child_id not in children, "sequence %d is forked twice", child_id)
            parent = self.sequences[parent_id]
            known = len(parent.token_ids) if parent.num_computed is None else parent.num_computed
            _require(token_count <= known, "a fork keeps %d tokens of fewer", token_count)
            child = WorkerSequence(
                [*parent.token_ids[:token_count], token_id],
                parent.digests[:token_count],
                parent.num_prompt_tokens,
                parent.params,
                [next(block_ids) for _ in range(block_count)],
                num_computed=token_count,
                has_failed=parent.has_failed,
            )
            child.digests.append(extend(child.digests[-1], token_id))
            children[child_id] = child
        _require(next(block_ids, None) is None, "a fork's blocks are miscounted")
        self.sequences.update(children)

    # The forward pass

    def _forward(self, plan: StepPlan) -> StepResult:
        sampled_ids: list[int] = []
        token_ids: list[int] = []
        failures: list[SequenceFailure] = []
        found: list[Candidates] = []
        scored: list[PromptLogprobs] = []
        starts = dict(zip(plan.sequence_ids, plan.start_positions, strict=True))
        logprobs = LogprobColumns()
        written: dict[int, int] = {}
        block_ids = iter(plan.new_block_ids)
        ready: list[tuple[int, WorkerSequence, bool]] = []
        for sequence_id, start, count, samples, num_new_blocks in zip(
            plan.sequence_ids, plan.start_positions, plan.token_counts, plan.samples, plan.new_block_counts, strict=True
        ):
            sequence = self.sequences.get(sequence_id)
            if sequence is None:
                raise ContractError(f"sequence {sequence_id} is scheduled and not known")
            sequence.block_table.extend(next(block_ids) for _ in range(num_new_blocks))
            if not sequence.has_failed:
                self._write(sequence_id, sequence, start, count, written)
                ready.append((sequence_id, sequence, samples))
        for sequence_id, sequence, samples in ready:
            if samples and self._sampling_key(sequence) in self._killing:
                raise WorkerKilledError(self._sampling_key(sequence))
            if self._reads_nan(sequence_id, sequence, written) or (
                samples and self._sampling_key(sequence) in self._failing
            ):
                self._fail(sequence_id, sequence, plan)
                failures.append(SequenceFailure(sequence_id, "the simulated model failed"))
                continue
            self._score_prompt(sequence_id, sequence, starts[sequence_id], scored)
            if not samples:
                continue
            _require(sequence.num_computed == len(sequence.token_ids), "sampled before all tokens are computed")
            if sequence.params.candidate_count:
                found.append(self._rank(sequence_id, sequence))
                continue
            token_id = self._sample(sequence)
            sampled_ids.append(sequence_id)
            token_ids.append(token_id)
            self._add_logprobs(logprobs, sequence, token_id)
        return StepResult(
            epoch=plan.epoch,
            step_seq=plan.step_seq,
            sequence_ids=sampled_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            errors=failures,
            candidates=found,
            prompt_logprobs=scored,
        )

    def _score_prompt(
        self, sequence_id: int, sequence: WorkerSequence, start: int, scored: list[PromptLogprobs]
    ) -> None:
        """Each token that was computed scores the next one of the prompt, from what is in memory."""
        last = min(sequence.num_computed or 0, sequence.num_prompt_tokens - 1)
        if not sequence.params.return_prompt_logprobs or last <= start:
            return
        columns, num_top = LogprobColumns(), sequence.params.top_prompt_logprob_count
        for position in range(start, last):
            state = self.device.blocks[sequence.block_table[position // self.block_size]][position % self.block_size]
            columns.logprobs.append(logprob(state, sequence.token_ids[position + 1]))
            columns.top_counts.append(num_top)
            for token_id, value in candidates(state, num_top) if num_top else ():
                columns.top_token_ids.append(token_id)
                columns.top_logprobs.append(value)
        scored.append(PromptLogprobs(sequence_id, start + 1, columns))

    def _write(
        self, sequence_id: int, sequence: WorkerSequence, start: int, count: int, written: dict[int, int]
    ) -> None:
        """Computes positions start to start + count - 1 into the sequence's blocks."""
        end, size, table = start + count, self.block_size, sequence.block_table
        _require(count >= 1, "nothing of sequence %d is to be computed", sequence_id)
        expected = sequence.num_computed
        _require(expected is None or start == expected, "sequence %d goes on at %d, not as planned", sequence_id, start)
        _require(end <= len(sequence.token_ids), "token %d of sequence %d is not known", end - 1, sequence_id)
        _require(len(table) == -(-end // size), "sequence %d has %d blocks for %d tokens", sequence_id, len(table), end)
        _require(len(set(table)) == len(table), "sequence %d has a block twice: %s", sequence_id, table)
        for index in range(start // size, -(-end // size)):
            block_id = table[index]
            writer = written.setdefault(block_id, sequence_id)
            _require(writer == sequence_id, "block %d is written by %d and %d", block_id, writer, sequence_id)
            begin, behind = max(start, index * size), min(end, (index + 1) * size)
            block = self.device.blocks[block_id]
            block[begin - index * size : behind - index * size] = sequence.digests[begin:behind]
        sequence.num_computed = end

    def _reads_nan(self, sequence_id: int, sequence: WorkerSequence, written: dict[int, int]) -> bool:
        """Attention: every position up to the last computed must hold what the tokens lead to. NaN is passed on."""
        size, blocks, states = self.block_size, self.device.blocks, sequence.digests
        num_computed = sequence.num_computed or 0
        position = 0
        for block_id in sequence.block_table:
            if written.get(block_id, sequence_id) != sequence_id:
                raise ContractError(f"sequence {sequence_id} reads block {block_id} in the step that writes it")
            behind = position + size
            if behind > num_computed:
                held = blocks[block_id][: num_computed - position]
                if held != states[position:num_computed]:
                    return self._explain(sequence_id, block_id, held, states[position:num_computed], position)
            elif blocks[block_id] != states[position:behind]:
                return self._explain(sequence_id, block_id, blocks[block_id], states[position:behind], position)
            position = behind
        return False

    @staticmethod
    def _explain(sequence_id: int, block_id: int, held: list[int], needed: list[int], position: int) -> bool:
        """True where a block holds NaN; else raises with what is wrong in it."""
        if NAN in held:
            return True
        slot = next(slot for slot, digest in enumerate(held) if digest != needed[slot])
        what = "nothing" if held[slot] == NOTHING else "something else"
        raise ContractError(
            f"sequence {sequence_id} reads position {position + slot} in block {block_id}, which holds {what} there"
        )

    @staticmethod
    def _sampling_key(sequence: WorkerSequence) -> tuple[int, int]:
        return sequence.params.seed, len(sequence.token_ids) - sequence.num_prompt_tokens

    def _fail(self, sequence_id: int, sequence: WorkerSequence, plan: StepPlan) -> None:
        """Leaves NaN where the sequence's step wrote, and does nothing more for it."""
        sequence.has_failed = True
        row = plan.sequence_ids.index(sequence_id)
        start = plan.start_positions[row]
        for position in range(start, start + plan.token_counts[row]):
            block_id = sequence.block_table[position // self.block_size]
            self.device.blocks[block_id][position % self.block_size] = NAN

    # Sampling

    @staticmethod
    def _suppressed(sequence: WorkerSequence) -> tuple[int, ...]:
        params = sequence.params
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        return params.suppressed_token_ids if num_output < params.min_token_count else ()

    def _sample(self, sequence: WorkerSequence) -> int:
        state = self._last_state(sequence)
        token_id = next_token(state, sequence.params.seed, self._suppressed(sequence))
        sequence.token_ids.append(token_id)
        sequence.digests.append(extend(state, token_id))
        return token_id

    def _rank(self, sequence_id: int, sequence: WorkerSequence) -> Candidates:
        ranked = candidates(self._last_state(sequence), sequence.params.candidate_count, self._suppressed(sequence))
        return Candidates(sequence_id, [token_id for token_id, _ in ranked], [value for _, value in ranked])

    def _last_state(self, sequence: WorkerSequence) -> int:
        """The digest behind the last token, from memory."""
        last = len(sequence.token_ids) - 1
        return self.device.blocks[sequence.block_table[last // self.block_size]][last % self.block_size]

    def _add_logprobs(self, columns: LogprobColumns, sequence: WorkerSequence, token_id: int) -> None:
        if not sequence.params.return_logprobs:
            return
        last = len(sequence.token_ids) - 2
        state = sequence.digests[last] if last >= 0 else EMPTY
        top = [(token_id + rank) % VOCAB_SIZE for rank in range(sequence.params.top_logprob_count)]
        columns.logprobs.append(logprob(state, token_id))
        columns.top_counts.append(len(top))
        columns.top_token_ids.extend(top)
        columns.top_logprobs.extend(logprob(state, token) for token in top)


def _require(condition: bool, message: str, *values: object) -> None:
    if not condition:
        raise ContractError(message % values if values else message)
