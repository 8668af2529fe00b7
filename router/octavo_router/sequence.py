"""A request's sequences: their tokens, their block tables, and how far plans have got with them.

Holds state and answers questions about it. Who runs when is the scheduler's business, who owns which block the block
manager's, and text is the engine's.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as TokenIds

from octavo_router.plan import NewSequence, SequenceParams
from octavo_router.request import Request

SEED_MODULUS = 1 << 64


class SequenceStatus(enum.Enum):
    """Where a sequence is. PREEMPTED is waiting to go on: it ran before and lost its blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class SequenceGroup:
    """One request and its n sequences, which are scheduled each on its own.

    stop_ids: token ids that end a sample. arrived_at and started_at are in the caller's clock; started_at is None until
    the first sequence is in a plan.
    """

    __slots__ = ("arrival", "arrived_at", "num_unfinished", "request", "sequences", "started_at", "stop_ids")

    def __init__(
        self, request: Request, *, arrival: int, first_sequence_id: int, eos_token_ids: frozenset[int], now: float
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.arrived_at = now
        self.started_at: float | None = None
        stopping = request.stopping
        self.stop_ids = stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | eos_token_ids
        self.sequences = [
            Sequence(self, sequence_id=first_sequence_id + index, sample_index=index)
            for index in range(request.sampling.n)
        ]
        self.num_unfinished = len(self.sequences)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all samples."""
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)


class Sequence:
    """One line of tokens.

    num_planned: tokens that plans have computed or will have, results back or not; a sequence's keys and values are in
    the cache up to there. num_in_flight: sampled tokens whose results are not back. The sequence's length counts them,
    since their places are taken:

        | prompt ............ | output known here | in flight |
        |<------- num_planned ------------------------->|    at rest, one behind num_tokens

    order: whoever has the smaller one goes first. It never changes, so that a preempted sequence keeps its place.
    """

    __slots__ = (
        "block_table",
        "group",
        "num_in_flight",
        "num_planned",
        "num_preemptions",
        "order",
        "output_token_ids",
        "prompt_token_ids",
        "sample_index",
        "sequence_id",
        "status",
    )

    def __init__(self, group: SequenceGroup, *, sequence_id: int, sample_index: int) -> None:
        self.group = group
        self.sequence_id = sequence_id
        self.sample_index = sample_index
        self.order = (group.request.priority, group.arrival, sample_index)
        self.prompt_token_ids: TokenIds[int] = group.request.prompt_token_ids
        self.output_token_ids: list[int] = []
        self.block_table: list[int] = []
        self.num_planned = 0
        self.num_in_flight = 0
        self.num_preemptions = 0
        self.status = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Its length once every plan in flight is answered."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def num_to_compute(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 for a decode, more for a prefill, never 0."""
        return self.num_tokens - self.num_planned

    @property
    def is_decode(self) -> bool:
        """Whether its next step computes nothing but the token sampled last."""
        return self.num_to_compute == 1 and self.num_planned >= len(self.prompt_token_ids)

    @property
    def has_all_planned(self) -> bool:
        """Whether the plans in flight bring its last token at the latest, so that nothing more may be planned."""
        return len(self.output_token_ids) + self.num_in_flight >= self.group.request.stopping.max_tokens

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.status is not SequenceStatus.FINISHED

    def new_sequence(self) -> NewSequence:
        """Its whole state, for a worker that does not hold it. Only without tokens in flight."""
        assert self.num_in_flight == 0, (
            f"sequence {self.sequence_id} is sent with {self.num_in_flight} tokens in flight"
        )
        request = self.group.request
        sampling, stopping, output = request.sampling, request.stopping, request.output
        suppressed = tuple(sorted(self.group.stop_ids)) if stopping.min_tokens else ()
        return NewSequence(
            sequence_id=self.sequence_id,
            prompt_token_count=len(self.prompt_token_ids),
            token_ids=[*self.prompt_token_ids, *self.output_token_ids],
            params=SequenceParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=(sampling.seed + self.sample_index) % SEED_MODULUS,
                return_logprobs=output.logprobs is not None,
                top_logprob_count=output.logprobs or 0,
                suppressed_token_ids=suppressed,
                min_token_count=stopping.min_tokens,
            ),
        )
