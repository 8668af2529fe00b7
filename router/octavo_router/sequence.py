"""A request's sequences: their tokens, their block tables, and how far plans have got with them.

Holds state and answers questions about it. Who runs when is the scheduler's business, who owns which block the block
manager's, and text is the engine's.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as TokenIds

from octavo_router.beam_group import BeamGroup
from octavo_router.fairness import Account
from octavo_router.plan import NewSequence, SequenceParams
from octavo_router.prompt_logprobs import PromptScores
from octavo_router.request import FinishReason, Request

SEED_MODULUS = 1 << 64


class SequenceStatus(enum.Enum):
    """Where a sequence is. PREEMPTED and SWAPPED wait to go on: they ran before and lost their blocks, the latter to
    the host."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


# Looked up once: a member of an enum costs more than the comparison with it.
_RUNNING, _FINISHED = SequenceStatus.RUNNING, SequenceStatus.FINISHED


class SequenceGroup:
    """One request and its sequences: a sample or a beam each.

    stop_ids: token ids that end a sample. arrived_at and started_at are in the caller's clock; started_at is None until
    the first sequence is in a plan. num_cached_tokens: tokens of the prompt that were in the prefix cache then.
    account: of its tenant, from the first wait to the end; is_admitted: whether a sequence of it has started once.
    returns_logprobs: whether sampled tokens come with log-probabilities: the request asked, or its best samples are
    chosen by them. prompt_hashes: of the prompt's full blocks, as far as somebody asked. prompt_scores: the prompt's
    log-probabilities, None where they are not asked for. is_prompt_only: no token is generated; one sequence computes
    the prompt, whatever the number of samples, and ends with it. watches_prompt: either, so that it matters how far the
    prompt is computed.
    """

    __slots__ = (
        "account",
        "arrival",
        "arrived_at",
        "beams",
        "is_admitted",
        "is_prompt_only",
        "num_cached_tokens",
        "num_running",
        "num_unfinished",
        "prompt_hashes",
        "prompt_scores",
        "request",
        "returns_logprobs",
        "sequences",
        "started_at",
        "stop_ids",
        "watches_prompt",
    )

    def __init__(
        self, request: Request, *, arrival: int, first_sequence_id: int, eos_token_ids: frozenset[int], now: float
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.arrived_at = now
        self.started_at: float | None = None
        self.account: Account | None = None
        self.is_admitted = False
        self.num_cached_tokens = 0
        self.num_running = 0
        self.prompt_hashes: list[bytes] = []
        self.prompt_scores: PromptScores | None = None
        if request.output.prompt_logprobs is not None:
            self.prompt_scores = PromptScores(len(request.prompt_token_ids))
        stopping, sampling = request.stopping, request.sampling
        self.returns_logprobs = request.output.logprobs is not None or sampling.best_of > sampling.n
        self.is_prompt_only = stopping.max_tokens == 0
        self.watches_prompt = self.is_prompt_only or self.prompt_scores is not None
        self.stop_ids = stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | eos_token_ids
        self.beams = BeamGroup(request, eos_token_ids=self.stop_ids) if sampling.beams is not None else None
        num_sequences = max(sampling.n, sampling.best_of) if self.beams is None else self.beams.width
        if self.is_prompt_only:
            num_sequences = 1
        self.sequences = [
            Sequence(self, sequence_id=first_sequence_id + index, sample_index=index) for index in range(num_sequences)
        ]
        self._resume()
        self.num_unfinished = sum(sequence.is_live for sequence in self.sequences)

    def _resume(self) -> None:
        """Samples that their caller holds in part begin with what it holds; those that have ended, end."""
        for resumed in self.request.resumed:
            sequence = self.sequences[resumed.sample_index]
            sequence.output_token_ids.extend(resumed.token_ids)
            if resumed.finish_reason is not None or self.end_of(sequence) is not None:
                sequence.status = SequenceStatus.FINISHED

    def charge(self, num_tokens: int) -> None:
        """Accounts computed tokens to its tenant."""
        if self.account is not None:
            self.account.charge(num_tokens)

    def end_of(self, sequence: Sequence) -> tuple[FinishReason, int | None] | None:
        """Why the last token of a sample's ends it, with the id where it is that; None if it does not."""
        output = sequence.output_token_ids
        if output and output[-1] in self.stop_ids:
            return FinishReason.STOP, output[-1]
        if len(output) >= self.request.stopping.max_tokens:
            return FinishReason.LENGTH, None
        return None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all samples."""
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)

    @property
    def running(self) -> list[Sequence]:
        """Its sequences in the batch."""
        return [sequence for sequence in self.sequences if sequence.status is _RUNNING]

    @property
    def has_beams_to_move(self) -> bool:
        """Whether its beams wait to be forked, or for some of them to come back into the batch."""
        return self.beams is not None and (self.beams.step is not None or self.num_running < self.beams.num_active)


class Sequence:
    """One line of tokens.

    num_planned: tokens that plans have computed or will have, results back or not; a sequence's keys and values are in
    the cache up to there. num_in_flight: sampled tokens whose results are not back. The sequence's length counts them,
    since their places are taken:

        | prompt ............ | output known here | in flight |
        |<------- num_planned ------------------------->|    at rest, one behind num_tokens

    A beam's next token is not taken but chosen: while it waits for that, everything it has is planned.

    num_computed: tokens whose computing was accepted; num_published: full blocks of those that were offered to the
    prefix cache; block_hashes: of its full blocks, as far as somebody asked. num_plans: plans in flight that compute
    any of it. host_table: where its blocks are while it is swapped out.

    order: whoever has the smaller one goes first. It is given when the request is admitted and never changes, so that
    a preempted sequence keeps its place. num_preemptions: how often it lost its blocks, num_evictions: how often to a
    request that arrived with a better priority.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "group",
        "host_table",
        "num_computed",
        "num_evictions",
        "num_in_flight",
        "num_planned",
        "num_plans",
        "num_preemptions",
        "num_published",
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
        self.host_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_preemptions = 0
        self.num_evictions = 0
        self.status = SequenceStatus.WAITING
        self.start_over()

    def start_over(self) -> None:
        """Nothing of it is computed."""
        self.num_planned = self.num_computed = self.num_published = 0
        self.num_in_flight = self.num_plans = 0

    @property
    def priority(self) -> int:
        """Its request's: lower goes first."""
        return self.group.request.priority

    @property
    def num_tokens(self) -> int:
        """Its length once every plan in flight is answered."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def num_to_compute(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 for a decode, more for a prefill. 0 only for a beam
        that waits for the others, and for a prompt behind which nothing is sampled."""
        num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight
        return num_tokens - self.num_planned

    @property
    def is_decode(self) -> bool:
        """Whether its next step computes nothing but the token sampled last."""
        return self.num_to_compute == 1 and self.num_planned >= len(self.prompt_token_ids)

    @property
    def num_due(self) -> int:
        """Tokens to compute that may be planned now. 0 where the plans in flight bring its last token at the latest,
        and for a beam that waits for the others."""
        num_output = len(self.output_token_ids) + self.num_in_flight
        if num_output >= self.group.request.stopping.max_tokens and not self.group.is_prompt_only:
            return 0
        return len(self.prompt_token_ids) + num_output - self.num_planned

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.status is not _FINISHED

    @property
    def was_preempted(self) -> bool:
        """Whether it waits to go on."""
        return self.status is SequenceStatus.PREEMPTED or self.status is SequenceStatus.SWAPPED

    def tokens(self, begin: int, end: int) -> list[int]:
        """Known tokens at these positions."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return list(self.prompt_token_ids[begin:end])
        head = list(self.prompt_token_ids[begin:num_prompt]) if begin < num_prompt else []
        return head + self.output_token_ids[max(0, begin - num_prompt) : end - num_prompt]

    def new_sequence(self) -> NewSequence:
        """Its whole state, for a worker that does not hold it. Only without tokens in flight."""
        assert self.num_in_flight == 0, (
            f"sequence {self.sequence_id} is sent with {self.num_in_flight} tokens in flight"
        )
        request, beams, scores = self.group.request, self.group.beams, self.group.prompt_scores
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
                return_logprobs=self.group.returns_logprobs,
                top_logprob_count=output.logprobs or 0,
                suppressed_token_ids=suppressed,
                min_token_count=stopping.min_tokens,
                candidate_count=beams.search.num_candidates if beams is not None else 0,
                return_prompt_logprobs=scores is not None and not scores.is_complete,
                top_prompt_logprob_count=output.prompt_logprobs or 0,
                rules=sampling.rules,
            ),
            block_ids=list(self.block_table),
        )
