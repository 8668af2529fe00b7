"""What the scheduler orders and what it is answered: a step's plan and a step's result, as plain columns.

These are the messages StepPlan and StepResult of octavo.worker.v1 without the wire; `worker_messages.py` turns one into
the other. Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo_router.request import NO_RULES, TokenLogprobs, TokenRules


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """How the worker samples one sequence. Tokens are suppressed while the output is shorter than min_token_count."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    return_logprobs: bool
    top_logprob_count: int
    suppressed_token_ids: tuple[int, ...]
    min_token_count: int
    candidate_count: int = 0
    """Candidates for beam search that come back instead of a sampled token; 0: a token is sampled."""
    return_prompt_logprobs: bool = False
    top_prompt_logprob_count: int = 0
    rules: TokenRules = NO_RULES


@dataclass(frozen=True, slots=True)
class NewSequence:
    """The state of a sequence that the worker does not hold.

    token_ids: the prompt, then the output so far; block_ids: its block table so far, shared and restored blocks.
    """

    sequence_id: int
    prompt_token_count: int
    token_ids: list[int]
    params: SequenceParams
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BlockMoves:
    """Blocks to copy, as two columns of one length."""

    source_block_ids: list[int] = field(default_factory=list)
    target_block_ids: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.source_block_ids)

    def append(self, source: int, target: int) -> None:
        """One more."""
        self.source_block_ids.append(source)
        self.target_block_ids.append(target)


@dataclass(slots=True)
class Moves:
    """What is copied before the forward pass, in this order. swap_out is from device to host, swap_in back, copies
    stay on the device."""

    swap_out: BlockMoves = field(default_factory=BlockMoves)
    swap_in: BlockMoves = field(default_factory=BlockMoves)
    copies: BlockMoves = field(default_factory=BlockMoves)

    def __len__(self) -> int:
        return len(self.swap_out) + len(self.swap_in) + len(self.copies)


@dataclass(slots=True)
class Forks:
    """Sequences that start, or start anew, as others' copies: an entry each.

    A child has its parent's first token_counts tokens and one of token_ids behind them. Parents are read before any
    child is written. block_ids: the children's block tables, one behind the other.
    """

    parent_sequence_ids: list[int] = field(default_factory=list)
    child_sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    block_counts: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.child_sequence_ids)

    def append(self, parent_id: int, child_id: int, *, num_kept: int, token_id: int, table: list[int]) -> None:
        """One more child, with so many of its parent's tokens."""
        self.parent_sequence_ids.append(parent_id)
        self.child_sequence_ids.append(child_id)
        self.token_ids.append(token_id)
        self.token_counts.append(num_kept)
        self.block_counts.append(len(table))
        self.block_ids += table


@dataclass(slots=True)
class StepPlan:
    """One step's orders, carried out in this order: releases, new sequences, moves, forks, and what is computed.

    The columns from sequence_ids to new_block_counts have one entry a scheduled sequence.
    start_positions: position of the first token to compute; token_counts: how many, at least 1; samples: whether a
    token is sampled behind the last; new_block_ids: the block ids appended to each table, one sequence's behind the
    other's.
    """

    epoch: int
    step_seq: int
    new_sequences: list[NewSequence] = field(default_factory=list)
    release_sequence_ids: list[int] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)
    forks: Forks = field(default_factory=Forks)
    sequence_ids: list[int] = field(default_factory=list)
    start_positions: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_block_counts: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.token_counts)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities of several tokens. The top columns are flat; top_counts tells how many each token has."""

    logprobs: list[float] = field(default_factory=list)
    top_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def unpack(self, token_ids: list[int]) -> list[TokenLogprobs]:
        """An entry for each token. Raises ValueError where the columns' lengths do not fit."""
        entries: list[TokenLogprobs] = []
        begin = 0
        for token_id, logprob, count in zip(token_ids, self.logprobs, self.top_counts, strict=True):
            end = begin + count
            top = zip(self.top_token_ids[begin:end], self.top_logprobs[begin:end], strict=True)
            entries.append(TokenLogprobs(token_id, logprob, tuple(top)))
            begin = end
        if begin != len(self.top_token_ids):
            raise ValueError(f"{len(self.top_token_ids)} likeliest tokens came, {begin} are counted")
        return entries


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a stretch of a prompt, whose first token is at start_position."""

    sequence_id: int
    start_position: int
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """One sequence that the worker could not go on with."""

    sequence_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """A beam's likeliest next tokens, likeliest first, with their log-probabilities."""

    sequence_id: int
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to the plan (epoch, step_seq): a token for each sequence that sampled, in the plan's order.

    logprobs: entries for the sequences that asked, in the same order. candidates: in place of a token, for beams.
    prompt_logprobs: of the sequences that asked, for the parts of their prompts that the step computed. Durations are
    in microseconds.
    """

    epoch: int
    step_seq: int
    sequence_ids: list[int]
    token_ids: list[int]
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    candidates: list[Candidates] = field(default_factory=list)
    errors: list[SequenceFailure] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    duration_us: int = 0
    idle_us: int = 0
