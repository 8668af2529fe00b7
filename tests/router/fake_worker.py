"""A worker without a model: it executes plans over pretended KV memory and holds the router to every rule of the
contract.

What it keeps in a block's slot is the token that was computed there and a hash of everything before it, as keys and
values depend on all before them. Whatever computes reads its whole context back *through the block table*, and each
slot has to hold the right token behind the right tokens. So a copy that is missing, a stale block, a wrong table or a
second writer is found, if no rule catches it before. `expected_output` and `expected_hypotheses` tell what a request
has to give, computed from the request alone.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo_router.beam_search import BeamSearch, Hypothesis
from octavo_router.plan import (
    BlockMoves,
    Candidates,
    Forks,
    LogprobColumns,
    NewSequence,
    PromptLogprobs,
    SequenceFailure,
    SequenceParams,
    StepPlan,
    StepResult,
)
from octavo_router.request import FinishReason, Request, TokenLogprobs

VOCAB_SIZE = 64
EOS_TOKEN_ID = 1
POISON = 63
"""A prompt with this token fails on the worker."""

Slot = tuple[int, int]
"""A token, and the hash of it and all before it."""


class ContractError(AssertionError):
    """The router broke a rule of octavo.worker.v1, or a block does not hold what its reader needs."""


@dataclass
class _Sequence:
    """num_computed: None until it is computed for the first time."""

    token_ids: list[int]
    prompt_token_count: int
    params: SequenceParams
    block_table: list[int] = field(default_factory=list)
    num_computed: int | None = None
    failed: bool = False


class FakeWorker:
    """One session's worker. num_used: device blocks in the tables of the sequences that it knows."""

    def __init__(
        self, *, block_size: int, num_blocks: int, num_host_blocks: int = 0, max_num_tokens: int = 1 << 30
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.max_num_tokens = max_num_tokens
        self.sequences: dict[int, _Sequence] = {}
        self.num_plans = 0
        self._holders: Counter[int] = Counter()
        self._device: dict[int, dict[int, Slot]] = {}
        self._host: dict[int, dict[int, Slot]] = {}
        self._freed_now: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def execute(self, plan: StepPlan) -> StepResult:
        """Does what a plan orders, in the contract's order. Raises ContractError where it must not be ordered."""
        self.num_plans += 1
        self._require(plan.step_seq == self.num_plans, f"plan {plan.step_seq} came, {self.num_plans} is next")
        self._check_columns(plan)
        self._freed_now = set()
        self._release(plan.release_sequence_ids)
        for new in plan.new_sequences:
            self._add(new)
        self._move(plan)
        self._fork(plan.forks)
        return self._forward(plan)

    def _check_columns(self, plan: StepPlan) -> None:
        columns = (plan.start_positions, plan.token_counts, plan.samples, plan.new_block_counts)
        self._require({len(column) for column in columns} == {len(plan.sequence_ids)}, "columns differ in length")
        self._require(len(set(plan.sequence_ids)) == len(plan.sequence_ids), "a sequence is scheduled twice")
        self._require(sum(plan.new_block_counts) == len(plan.new_block_ids), "new blocks are miscounted")
        self._require(plan.num_tokens <= self.max_num_tokens, f"{plan.num_tokens} tokens are over the limit")
        orders = (plan.sequence_ids, plan.release_sequence_ids, plan.new_sequences, plan.moves, plan.forks)
        self._require(any(len(order) for order in orders), "a plan orders nothing")

    # Tables

    def _hold(self, sequence: _Sequence, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._require(0 <= block_id < self.num_blocks, f"there is no block {block_id}")
        self._holders.update(block_ids)
        sequence.block_table += block_ids

    def _let_go(self, sequence: _Sequence) -> None:
        for block_id in sequence.block_table:
            self._holders[block_id] -= 1
            if self._holders[block_id] == 0:
                del self._holders[block_id]
                self._freed_now.add(block_id)

    def _release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            sequence = self.sequences.pop(sequence_id, None)
            self._require(sequence is not None, f"sequence {sequence_id} is released and not known")
            if sequence is not None:
                self._let_go(sequence)

    def _add(self, new: NewSequence) -> None:
        self._require(new.sequence_id not in self.sequences, f"sequence {new.sequence_id} is known already")
        self._require(0 < new.prompt_token_count <= len(new.token_ids), "the prompt's length is wrong")
        sequence = _Sequence(list(new.token_ids), new.prompt_token_count, new.params)
        self._hold(sequence, new.block_ids)
        self.sequences[new.sequence_id] = sequence

    def _fork(self, forks: Forks) -> None:
        """All parents are read before any child is written."""
        columns = (forks.parent_sequence_ids, forks.token_ids, forks.token_counts, forks.block_counts)
        self._require({len(column) for column in columns} == {len(forks)}, "the columns of forks differ in length")
        self._require(sum(forks.block_counts) == len(forks.block_ids), "the blocks of forks are miscounted")
        block_ids = iter(forks.block_ids)
        children: dict[int, tuple[_Sequence, list[int]]] = {}
        for parent_id, child_id, token_id, num_kept, num_blocks in zip(
            forks.parent_sequence_ids,
            forks.child_sequence_ids,
            forks.token_ids,
            forks.token_counts,
            forks.block_counts,
            strict=True,
        ):
            parent = self.sequences[parent_id]
            # Of a sequence that came with its blocks only reading can tell how much is in them.
            num_computed = len(parent.token_ids) if parent.num_computed is None else parent.num_computed
            self._require(num_kept <= num_computed, f"{num_kept} tokens of sequence {parent_id} are not all computed")
            self._require(child_id not in children, f"sequence {child_id} is forked twice")
            tokens = [*parent.token_ids[:num_kept], token_id]
            child = _Sequence(tokens, parent.prompt_token_count, parent.params, [], num_kept, parent.failed)
            children[child_id] = child, [next(block_ids) for _ in range(num_blocks)]
        for child, table in children.values():
            self._hold(child, table)
        for child_id in children:
            if child_id in self.sequences:
                self._let_go(self.sequences[child_id])
        self.sequences.update({child_id: child for child_id, (child, _) in children.items()})

    # Moves

    def _move(self, plan: StepPlan) -> None:
        moves = plan.moves
        self._copy(moves.swap_out, self._device, self._host, self.num_host_blocks)
        self._copy(moves.swap_in, self._host, self._device, self.num_blocks)
        shared = set(moves.copies.source_block_ids) & set(moves.copies.target_block_ids)
        self._require(not shared, f"blocks {shared} are copied from and to")
        self._copy(moves.copies, self._device, self._device, self.num_blocks)
        for block_id in (*moves.swap_in.target_block_ids, *moves.copies.target_block_ids):
            self._require(block_id not in self._freed_now, f"block {block_id} is freed and used in one plan")

    def _copy(
        self,
        moves: BlockMoves,
        sources: dict[int, dict[int, Slot]],
        targets: dict[int, dict[int, Slot]],
        num_targets: int,
    ) -> None:
        self._require(len(set(moves.target_block_ids)) == len(moves.target_block_ids), "a block is moved to twice")
        for source, target in zip(moves.source_block_ids, moves.target_block_ids, strict=True):
            self._require(0 <= target < num_targets, f"there is no block {target} to move to")
            self._require(source in sources, f"block {source} is moved and holds nothing")
            targets[target] = dict(sources[source])

    # The forward pass

    def _forward(self, plan: StepPlan) -> StepResult:
        """Every row writes before any reads, as a layer does."""
        result = StepResult(plan.epoch, plan.step_seq, [], [], duration_us=1000, idle_us=10)
        block_ids = iter(plan.new_block_ids)
        rows = zip(
            plan.sequence_ids, plan.start_positions, plan.token_counts, plan.samples, plan.new_block_counts, strict=True
        )
        computed: list[tuple[int, _Sequence, bool]] = []
        for sequence_id, start, count, samples, num_new_blocks in rows:
            self._require(sequence_id in self.sequences, f"sequence {sequence_id} is scheduled and not known")
            sequence = self.sequences[sequence_id]
            self._append_blocks(sequence, [next(block_ids) for _ in range(num_new_blocks)])
            if sequence.failed:
                continue
            if POISON in sequence.token_ids[: sequence.prompt_token_count]:
                sequence.failed = True
                result.errors.append(SequenceFailure(sequence_id, "the prompt is poisoned"))
                continue
            self._compute(sequence_id, sequence, start, count)
            computed.append((sequence_id, sequence, samples))
            self._score_prompt(sequence_id, sequence, start, result)
        for sequence_id, sequence, samples in computed:
            self._check_context(sequence_id, sequence)
            if samples:
                self._answer(sequence_id, sequence, result)
        return result

    @staticmethod
    def _score_prompt(sequence_id: int, sequence: _Sequence, start: int, result: StepResult) -> None:
        """Each token that was computed scores the next one of the prompt."""
        last = min(sequence.num_computed or 0, sequence.prompt_token_count - 1)
        if not sequence.params.return_prompt_logprobs or last <= start:
            return
        columns, num_top = LogprobColumns(), sequence.params.top_prompt_logprob_count
        for position in range(start + 1, last + 1):
            logprob, top = prompt_score(sequence.token_ids, position, num_top)
            columns.logprobs.append(logprob)
            columns.top_counts.append(num_top)
            columns.top_token_ids.extend(token_id for token_id, _ in top)
            columns.top_logprobs.extend(value for _, value in top)
        result.prompt_logprobs.append(PromptLogprobs(sequence_id, start + 1, columns))

    def _append_blocks(self, sequence: _Sequence, block_ids: list[int]) -> None:
        self._hold(sequence, block_ids)
        for block_id in block_ids:
            self._require(block_id not in self._freed_now, f"block {block_id} is freed and used in one plan")
            self._device[block_id] = {}

    def _compute(self, sequence_id: int, sequence: _Sequence, start: int, count: int) -> None:
        end = start + count
        self._require(count >= 1, "nothing is to be computed")
        self._require(
            start == sequence.num_computed or sequence.num_computed is None,
            f"position {start} is next in the plan, {sequence.num_computed} here",
        )
        self._require(end <= len(sequence.token_ids), f"token {end - 1} is not known")
        self._require(
            len(sequence.block_table) == -(-end // self.block_size),
            f"{len(sequence.block_table)} blocks for {end} tokens: too few, or a whole one wasted",
        )
        for position, slot in enumerate(slots_of(sequence.token_ids[:end])):
            if position >= start:
                block_id = sequence.block_table[position // self.block_size]
                num_holders = self._holders[block_id]
                self._require(num_holders == 1, f"sequence {sequence_id} writes to block {block_id} of {num_holders}")
                self._device.setdefault(block_id, {})[position % self.block_size] = slot
        sequence.num_computed = end

    def _check_context(self, sequence_id: int, sequence: _Sequence) -> None:
        """Everything that the sequence reads is what its own tokens lead to."""
        for position, slot in enumerate(slots_of(sequence.token_ids[: sequence.num_computed])):
            block_id = sequence.block_table[position // self.block_size]
            found = self._device.get(block_id, {}).get(position % self.block_size)
            self._require(
                found == slot, f"sequence {sequence_id} reads {found} at {position} in block {block_id}, not {slot}"
            )

    def _answer(self, sequence_id: int, sequence: _Sequence, result: StepResult) -> None:
        """Samples, or chooses candidates, behind the last token."""
        self._require(sequence.num_computed == len(sequence.token_ids), "sampled before all tokens are computed")
        num_output = len(sequence.token_ids) - sequence.prompt_token_count
        params = sequence.params
        suppressed = params.suppressed_token_ids if num_output < params.min_token_count else ()
        if params.candidate_count:
            best = next_candidates(sequence.token_ids, params.candidate_count, suppressed)
            token_ids, logprobs = [token_id for token_id, _ in best], [logprob for _, logprob in best]
            result.candidates.append(Candidates(sequence_id, token_ids, logprobs))
            return
        token_id = next_token(sequence.token_ids, params.seed, suppressed)
        sequence.token_ids.append(token_id)
        result.sequence_ids.append(sequence_id)
        result.token_ids.append(token_id)
        self._add_logprobs(result.logprobs, sequence, token_id)

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


def slots_of(token_ids: list[int]) -> list[Slot]:
    """What a sequence's blocks hold at each position."""
    chain = 0
    slots: list[Slot] = []
    for token_id in token_ids:
        chain = zlib.crc32(token_id.to_bytes(4, "little"), (chain + 1) & 0xFFFFFFFF)
        slots.append((token_id, chain))
    return slots


def next_token(token_ids: list[int], seed: int, suppressed: tuple[int, ...] = ()) -> int:
    """The model: a hash of everything before, and of the seed."""
    token_id = zlib.crc32(array("I", token_ids).tobytes(), seed & 0xFFFFFFFF) % (VOCAB_SIZE - 1)
    while token_id in suppressed:
        token_id = (token_id + 1) % (VOCAB_SIZE - 1)
    return token_id


def next_candidates(token_ids: list[int], count: int, suppressed: tuple[int, ...] = ()) -> list[tuple[int, float]]:
    """The model for beams: the likeliest tokens, with log-probabilities whose sums are exact in fp32."""
    context = zlib.crc32(array("I", token_ids).tobytes())
    candidates = [
        (token_id, -float(zlib.crc32(token_id.to_bytes(4, "little"), context) % 2048) / 256)
        for token_id in range(VOCAB_SIZE - 1)
        if token_id not in suppressed
    ]
    return sorted(candidates, key=lambda candidate: -candidate[1])[:count]


def logprob_of(token_id: int) -> float:
    """What the fake model says of a token that it sampled. Exact in binary."""
    return -(token_id + 1) / 8


def prompt_score(token_ids: Sequence[int], position: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """What the fake model says of a prompt's token at a position: its log-probability, and the likeliest there."""
    context = zlib.crc32(array("I", token_ids[:position]).tobytes())
    logprob = -float(zlib.crc32(token_ids[position].to_bytes(4, "little"), context) % 2048) / 256
    return logprob, next_candidates(list(token_ids[:position]), num_top) if num_top else []


def expected_prompt_scores(request: Request) -> list[TokenLogprobs]:
    """What comes of a prompt from its second token on, whatever runs beside it."""
    prompt, num_top = request.prompt_token_ids, request.output.prompt_logprobs
    assert num_top is not None
    scores = [prompt_score(prompt, position, num_top) for position in range(1, len(prompt))]
    return [TokenLogprobs(token, *score[:1], tuple(score[1])) for token, score in zip(prompt[1:], scores, strict=True)]


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


def expected_hypotheses(
    request: Request, eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID})
) -> list[Hypothesis]:
    """What a beam search has to find, whatever runs beside it."""
    stopping, beams = request.stopping, request.sampling.beams
    assert beams is not None
    stop_ids = stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | eos_token_ids
    search = BeamSearch(beams, max_tokens=stopping.max_tokens, eos_token_ids=stop_ids)
    outputs: list[list[int]] = [[]]
    while True:
        suppressed = tuple(sorted(stop_ids)) if len(outputs[0]) < stopping.min_tokens else ()
        prompt = list(request.prompt_token_ids)
        step = search.step([next_candidates(prompt + output, search.num_candidates, suppressed) for output in outputs])
        if step.is_done:
            return search.hypotheses(request.sampling.n)
        outputs = [[*outputs[parent], token] for parent, token in zip(step.parents, step.token_ids, strict=True)]
