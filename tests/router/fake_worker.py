"""A worker without a model: it executes plans over pretended KV memory and holds the router to every rule of the
contract.

What it keeps in a block's slot is the token that was computed there; what it samples is a hash of the tokens that it
reads back *through the block table*, so that a wrong table, a stale block or a double writer gives a wrong token, if no
rule catches it before. `expected_output` tells the tokens that a request has to give, computed from the request alone.
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field

from octavo_router.plan import LogprobColumns, NewSequence, SequenceFailure, SequenceParams, StepPlan, StepResult
from octavo_router.request import FinishReason, Request

VOCAB_SIZE = 64
EOS_TOKEN_ID = 1
POISON = 63
"""A prompt with this token fails on the worker."""


class ContractError(AssertionError):
    """The router broke a rule of octavo.worker.v1."""


@dataclass
class _Sequence:
    token_ids: list[int]
    prompt_token_count: int
    params: SequenceParams
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    failed: bool = False


class FakeWorker:
    """One session's worker. num_used: blocks in the tables of the sequences that it knows."""

    def __init__(self, *, block_size: int, num_blocks: int, max_num_tokens: int = 1 << 30) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_tokens = max_num_tokens
        self.sequences: dict[int, _Sequence] = {}
        self.num_plans = 0
        self._owners: dict[int, int] = {}
        self._memory: dict[tuple[int, int], int] = {}
        self._released_now: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self._owners)

    def execute(self, plan: StepPlan) -> StepResult:
        """Does what a plan orders, in the contract's order. Raises ContractError where it must not be ordered."""
        self.num_plans += 1
        self._require(plan.step_seq == self.num_plans, f"plan {plan.step_seq} came, {self.num_plans} is next")
        self._check_columns(plan)
        self._release(plan.release_sequence_ids)
        for new in plan.new_sequences:
            self._add(new)
        return self._forward(plan)

    def _check_columns(self, plan: StepPlan) -> None:
        columns = (plan.start_positions, plan.token_counts, plan.samples, plan.new_block_counts)
        self._require({len(column) for column in columns} == {len(plan.sequence_ids)}, "columns differ in length")
        self._require(len(set(plan.sequence_ids)) == len(plan.sequence_ids), "a sequence is scheduled twice")
        self._require(sum(plan.new_block_counts) == len(plan.new_block_ids), "new blocks are miscounted")
        self._require(plan.num_tokens <= self.max_num_tokens, f"{plan.num_tokens} tokens are over the limit")
        self._require(bool(plan.sequence_ids or plan.release_sequence_ids), "a plan orders nothing")
        self._require(
            {new.sequence_id for new in plan.new_sequences} <= set(plan.sequence_ids), "a sequence is sent for nothing"
        )

    def _release(self, sequence_ids: list[int]) -> None:
        self._released_now = set()
        for sequence_id in sequence_ids:
            sequence = self.sequences.pop(sequence_id, None)
            self._require(sequence is not None, f"sequence {sequence_id} is released and not known")
            for block_id in sequence.block_table if sequence else ():
                del self._owners[block_id]
                self._released_now.add(block_id)

    def _add(self, new: NewSequence) -> None:
        self._require(new.sequence_id not in self.sequences, f"sequence {new.sequence_id} is known already")
        self._require(0 < new.prompt_token_count <= len(new.token_ids), "the prompt's length is wrong")
        self.sequences[new.sequence_id] = _Sequence(list(new.token_ids), new.prompt_token_count, new.params)

    def _forward(self, plan: StepPlan) -> StepResult:
        sampled_ids: list[int] = []
        token_ids: list[int] = []
        failures: list[SequenceFailure] = []
        logprobs = LogprobColumns()
        block_ids = iter(plan.new_block_ids)
        rows = zip(
            plan.sequence_ids, plan.start_positions, plan.token_counts, plan.samples, plan.new_block_counts, strict=True
        )
        for sequence_id, start, count, samples, num_new_blocks in rows:
            self._require(sequence_id in self.sequences, f"sequence {sequence_id} is scheduled and not known")
            sequence = self.sequences[sequence_id]
            self._append_blocks(sequence_id, sequence, [next(block_ids) for _ in range(num_new_blocks)])
            if sequence.failed:
                continue
            if POISON in sequence.token_ids[: sequence.prompt_token_count]:
                sequence.failed = True
                failures.append(SequenceFailure(sequence_id, "the prompt is poisoned"))
                continue
            self._compute(sequence, start, count)
            if samples:
                token_id = self._sample(sequence)
                sampled_ids.append(sequence_id)
                token_ids.append(token_id)
                self._add_logprobs(logprobs, sequence, token_id)
        return StepResult(
            plan.epoch, plan.step_seq, sampled_ids, token_ids, logprobs, failures, duration_us=1000, idle_us=10
        )

    def _append_blocks(self, sequence_id: int, sequence: _Sequence, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._require(0 <= block_id < self.num_blocks, f"there is no block {block_id}")
            self._require(block_id not in self._released_now, f"block {block_id} is freed and used in one plan")
            owner = self._owners.get(block_id)
            self._require(owner is None, f"block {block_id} has two writers: {owner} and {sequence_id}")
            self._owners[block_id] = sequence_id
            sequence.block_table.append(block_id)

    def _compute(self, sequence: _Sequence, start: int, count: int) -> None:
        end = start + count
        self._require(count >= 1, "nothing is to be computed")
        self._require(
            start == sequence.num_computed, f"position {start} is next in the plan, {sequence.num_computed} here"
        )
        self._require(end <= len(sequence.token_ids), f"token {end - 1} is not known")
        self._require(
            len(sequence.block_table) == -(-end // self.block_size),
            f"{len(sequence.block_table)} blocks for {end} tokens: too few, or a whole one wasted",
        )
        for position in range(start, end):
            slot = sequence.block_table[position // self.block_size], position % self.block_size
            self._memory[slot] = sequence.token_ids[position]
        sequence.num_computed = end

    def _sample(self, sequence: _Sequence) -> int:
        self._require(sequence.num_computed == len(sequence.token_ids), "sampled before all tokens are computed")
        read_back = [
            self._memory[sequence.block_table[position // self.block_size], position % self.block_size]
            for position in range(sequence.num_computed)
        ]
        num_output = len(sequence.token_ids) - sequence.prompt_token_count
        params = sequence.params
        suppressed = params.suppressed_token_ids if num_output < params.min_token_count else ()
        token_id = next_token(read_back, params.seed, suppressed)
        sequence.token_ids.append(token_id)
        return token_id

    @staticmethod
    def _add_logprobs(columns: LogprobColumns, sequence: _Sequence, token_id: int) -> None:
        if not sequence.params.return_logprobs:
            return
        top = range(sequence.params.top_logprob_count)
        columns.logprobs.append(logprob_of(token_id))
        columns.top_counts.append(len(top))
        columns.top_token_ids.extend((token_id + rank) % VOCAB_SIZE for rank in top)
        columns.top_logprobs.extend(logprob_of(token_id) - rank for rank in top)

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise ContractError(message)


def next_token(token_ids: list[int], seed: int, suppressed: tuple[int, ...] = ()) -> int:
    """The model: a hash of everything before, and of the seed."""
    token_id = zlib.crc32(array("I", token_ids).tobytes(), seed & 0xFFFFFFFF) % (VOCAB_SIZE - 1)
    while token_id in suppressed:
        token_id = (token_id + 1) % (VOCAB_SIZE - 1)
    return token_id


def logprob_of(token_id: int) -> float:
    """What the fake model says of a token that it sampled. Exact in binary."""
    return -(token_id + 1) / 8


def expected_output(
    request: Request, sample_index: int = 0, eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID})
) -> tuple[list[int], FinishReason]:
    """What a sample has to be, whatever runs beside it. Stop strings are left out of account."""
    stopping = request.stopping
    stop_ids = stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | eos_token_ids
    token_ids = list(request.prompt_token_ids)
    output: list[int] = []
    while len(output) < stopping.max_tokens:
        suppressed = tuple(sorted(stop_ids)) if len(output) < stopping.min_tokens else ()
        output.append(next_token(token_ids + output, request.sampling.seed + sample_index, suppressed))
        if output[-1] in stop_ids:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH
