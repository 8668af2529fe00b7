"""A step's plan in the making: what is in it so far, and what is left for others.

Keeps the books while the scheduler decides. What goes into a plan is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from octavo_router.limits import Limits
from octavo_router.plan import Forks, Moves, NewSequence, StepPlan
from octavo_router.results import PlanInFlight
from octavo_router.sequence import Sequence, SequenceGroup


class Row(NamedTuple):
    """What a step computes of one sequence: num_tokens from position start on; samples: whether something is sampled,
    or candidates are chosen, behind them; is_prefill: they are not just the one that was sampled last."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    is_prefill: bool
    new_block_ids: list[int]


@dataclass(slots=True)
class Draft:
    """A plan in the making.

    num_decodes_to_come: decodes that have a token set aside in the budget. num_owed: blocks that sequences lack which
    could not go on; num_coming: blocks that will be free for a later plan; candidates: who may have to give up blocks,
    last in order first; held: who is held back from this step, so that it can. num_spare: blocks, and num_places:
    places in the batch, that waiting sequences may take. started: who joined the batch in this step; first_started:
    requests of which nobody had before. prompts: as in PlanInFlight.
    """

    limits: Limits
    now: float
    num_coming: int
    candidates: Iterator[Sequence]
    num_decodes_to_come: int = 0
    num_owed: int = 0
    num_spare: int = 0
    num_places: int = 0
    num_tokens: int = 0
    held: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    first_started: list[SequenceGroup] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    forks: Forks = field(default_factory=Forks)
    rows: dict[int, Row] = field(default_factory=dict)
    prompts: list[tuple[Sequence, int]] = field(default_factory=list)

    def num_affordable(self, num_due: int) -> int:
        """Of so many tokens, those that the budget has room for: all of them, or a chunk where chunks are allowed.

        Without chunked prefill only one thing is split: tokens computed again that exceed a whole step's budget,
        because the output came on top of a prompt that did fit.
        """
        budget = self.limits.max_num_batched_tokens
        room = budget - self.num_tokens - self.num_decodes_to_come
        if num_due <= room:
            return num_due
        return room if self.limits.enable_chunked_prefill or num_due > budget else 0

    def num_planned_before(self, sequence: Sequence) -> int:
        """Tokens of a sequence's that earlier plans compute; 0 for one that joined with this one."""
        if sequence.sequence_id in self.started:
            return 0
        row = self.rows.get(sequence.sequence_id)
        return row.start if row is not None else sequence.num_planned

    def add(self, row: Row) -> None:
        """Takes in what the step computes of one more sequence."""
        self.num_tokens += row.num_tokens
        self.rows[row.sequence.sequence_id] = row
        if row.sequence.group.watches_prompt and row.start < len(row.sequence.prompt_token_ids):
            self.prompts.append((row.sequence, row.start + row.num_tokens))

    def plan(self, *, epoch: int, step_seq: int, releases: list[int], moves: Moves) -> StepPlan:
        """The plan, decodes first."""
        rows = self._decodes_first
        return StepPlan(
            epoch=epoch,
            step_seq=step_seq,
            new_sequences=self.new_sequences,
            release_sequence_ids=releases,
            moves=moves,
            forks=self.forks,
            sequence_ids=[row.sequence.sequence_id for row in rows],
            start_positions=[row.start for row in rows],
            token_counts=[row.num_tokens for row in rows],
            samples=[row.samples for row in rows],
            new_block_counts=[len(row.new_block_ids) for row in rows],
            new_block_ids=[block_id for row in rows for block_id in row.new_block_ids],
        )

    def in_flight(self, step_seq: int) -> PlanInFlight:
        """What must be remembered of the plan."""
        return PlanInFlight(
            step_seq,
            self.num_tokens,
            computed=[(row.sequence, row.start + row.num_tokens) for row in self.rows.values()],
            sampled=[row.sequence for row in self._decodes_first if row.samples],
            prompts=self.prompts,
        )

    @property
    def _decodes_first(self) -> list[Row]:
        return sorted(self.rows.values(), key=attrgetter("is_prefill"))
