"""The messages of octavo.worker.v1 and `plan.py`'s columns: each turned into the other.

How messages travel is `worker_client.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo.worker.v1 import worker_pb2 as pb
from octavo_router.plan import (
    BlockMoves,
    Candidates,
    Forks,
    LogprobColumns,
    NewSequence,
    PromptLogprobs,
    SequenceFailure,
    StepPlan,
    StepResult,
)
from octavo_router.request import NO_RULES, TokenRules

MAX_TOKENS_PER_MESSAGE = 32 * 1024


def plan_message(plan: StepPlan) -> pb.StepPlan:
    """A plan as a message. Of a long sequence's tokens it has the last piece; the others go ahead of it."""
    return pb.StepPlan(
        new_sequences=[_new_sequence_message(new) for new in plan.new_sequences],
        release_sequence_ids=plan.release_sequence_ids,
        swap_out=_moves_message(plan.moves.swap_out),
        swap_in=_moves_message(plan.moves.swap_in),
        copies=_moves_message(plan.moves.copies),
        forks=_forks_message(plan.forks),
        scheduled=pb.ScheduledSequences(
            sequence_ids=plan.sequence_ids,
            start_positions=plan.start_positions,
            token_counts=plan.token_counts,
            samples=plan.samples,
            new_block_counts=plan.new_block_counts,
            new_block_ids=plan.new_block_ids,
        ),
    )


def _moves_message(moves: BlockMoves) -> pb.BlockMoves | None:
    if not moves:
        return None
    return pb.BlockMoves(source_block_ids=moves.source_block_ids, target_block_ids=moves.target_block_ids)


def _forks_message(forks: Forks) -> pb.Forks | None:
    if not forks:
        return None
    return pb.Forks(
        parent_sequence_ids=forks.parent_sequence_ids,
        child_sequence_ids=forks.child_sequence_ids,
        token_ids=forks.token_ids,
        block_counts=forks.block_counts,
        block_ids=forks.block_ids,
        token_counts=forks.token_counts,
    )


def result_columns(response: pb.RunResponse) -> StepResult:
    """A result as columns."""
    result = response.result
    return StepResult(
        epoch=response.epoch,
        step_seq=response.step_seq,
        sequence_ids=list(result.sequence_ids),
        token_ids=list(result.token_ids),
        logprobs=_logprob_columns(result.logprobs),
        prompt_logprobs=[
            PromptLogprobs(stretch.sequence_id, stretch.start_position, _logprob_columns(stretch.columns))
            for stretch in result.prompt_logprobs
        ],
        candidates=[
            Candidates(beam.sequence_id, list(beam.token_ids), list(beam.logprobs)) for beam in result.candidates
        ],
        errors=[SequenceFailure(error.sequence_id, error.message) for error in result.errors],
        duration_us=result.duration_us,
        idle_us=result.idle_us,
    )


def _logprob_columns(message: pb.LogprobColumns) -> LogprobColumns:
    return LogprobColumns(
        list(message.logprobs), list(message.top_counts), list(message.top_token_ids), list(message.top_logprobs)
    )


def _split_point(num_tokens: int) -> int:
    """Where the last piece begins: a whole number of pieces before it, itself not empty."""
    return max(0, num_tokens - 1) // MAX_TOKENS_PER_MESSAGE * MAX_TOKENS_PER_MESSAGE


def pieces_ahead(new: NewSequence) -> Iterator[pb.SequenceTokens]:
    """What goes ahead of the plan that brings a long sequence: its tokens but for the last piece."""
    for begin in range(0, _split_point(len(new.token_ids)), MAX_TOKENS_PER_MESSAGE):
        piece = new.token_ids[begin : begin + MAX_TOKENS_PER_MESSAGE]
        yield pb.SequenceTokens(sequence_id=new.sequence_id, token_ids=piece)


def _new_sequence_message(new: NewSequence) -> pb.NewSequence:
    params = new.params
    return pb.NewSequence(
        sequence_id=new.sequence_id,
        prompt_token_count=new.prompt_token_count,
        token_ids=new.token_ids[_split_point(len(new.token_ids)) :],
        block_ids=new.block_ids,
        params=pb.SequenceParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            return_logprobs=params.return_logprobs,
            top_logprob_count=params.top_logprob_count,
            return_prompt_logprobs=params.return_prompt_logprobs,
            top_prompt_logprob_count=params.top_prompt_logprob_count,
            suppressed_token_ids=params.suppressed_token_ids,
            min_token_count=params.min_token_count,
            candidate_count=params.candidate_count,
            **_rules_fields(params.rules),
        ),
    )


def _rules_fields(rules: TokenRules) -> dict[str, Any]:
    """Fields of SequenceParams that say which tokens are favoured or forbidden."""
    if rules == NO_RULES:
        return {}
    return {
        "presence_penalty": rules.presence_penalty,
        "frequency_penalty": rules.frequency_penalty,
        "repetition_penalty": rules.repetition_penalty,
        "logit_bias_token_ids": [token_id for token_id, _ in rules.logit_bias],
        "logit_biases": [bias for _, bias in rules.logit_bias],
        "allowed_token_ids": rules.allowed_token_ids,
        "bad_word_token_ids": [token_id for word in rules.bad_words for token_id in word],
        "bad_word_lengths": [len(word) for word in rules.bad_words],
        "grammar": rules.grammar,
    }
