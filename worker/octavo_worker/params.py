"""Checks what a plan says about one new sequence: its tokens, and sampling parameters that this worker offers."""

from __future__ import annotations

import itertools
import math

import numpy as np

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.sequences import TokenArray

# Bounds of penalties and biases: those of OpenAI's API.
_GREATEST_PENALTY, _GREATEST_BIAS = 2.0, 100.0
# Lists of token ids, none of which may name an id that cannot be sampled.
_ID_FIELDS = ("suppressed_token_ids", "logit_bias_token_ids", "allowed_token_ids", "bad_word_token_ids")


def params_problem(params: pb.SequenceParams, num_sampled: int, *, has_grammars: bool = True) -> str | None:
    """Why these parameters cannot be served, for people; None if they can.

    num_sampled: ids that may be sampled; has_grammars: whether this worker offers grammars.
    """
    if params.adapter:
        return "params.adapter is not offered by this worker"
    if params.grammar and not has_grammars:
        return "params.grammar is not offered by this worker"
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        return f"params.temperature is {params.temperature}; it must be 0 or more"
    if not (0 <= params.top_p <= 1 and 0 <= params.min_p <= 1):
        return f"params.top_p is {params.top_p} and params.min_p {params.min_p}; both must be from 0 to 1"
    for name in _ID_FIELDS:
        worst = max(getattr(params, name), default=0)
        if worst >= num_sampled:
            return f"params.{name} has {worst}; ids end at {num_sampled - 1}"
    return _adjustments_problem(params) or _bans_problem(params, num_sampled) or _beam_problem(params)


def _adjustments_problem(params: pb.SequenceParams) -> str | None:
    """What is wrong with penalties and biases."""
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not abs(value) <= _GREATEST_PENALTY:
            return f"params.{name} is {value}; it must be from -{_GREATEST_PENALTY:g} to {_GREATEST_PENALTY:g}"
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty >= 0):
        return f"params.repetition_penalty is {params.repetition_penalty}; it must be above 0, or 0 for none"
    ids = params.logit_bias_token_ids
    if len(ids) != len(params.logit_biases):
        return f"params.logit_biases has {len(params.logit_biases)} entries for {len(ids)} tokens"
    if len(set(ids)) != len(ids):
        return "params.logit_bias_token_ids names a token twice"
    for bias in params.logit_biases:
        if not abs(bias) <= _GREATEST_BIAS:
            return f"params.logit_biases has {bias}; a bias must be from -{_GREATEST_BIAS:g} to {_GREATEST_BIAS:g}"
    return None


def _bans_problem(params: pb.SequenceParams, num_sampled: int) -> str | None:
    """What is wrong with the ids that may not be sampled. Whether a grammar leaves any shows while it is run."""
    lengths = params.bad_word_lengths
    if sum(lengths) != len(params.bad_word_token_ids):
        return f"params.bad_word_lengths sums up to {sum(lengths)} for {len(params.bad_word_token_ids)} tokens"
    if 0 in lengths:
        return "params.bad_word_lengths has a 0; a bad word has at least one token"
    suppressed = set(params.suppressed_token_ids)
    if not (suppressed or params.allowed_token_ids or lengths):
        return None
    if len(suppressed) >= num_sampled:
        return "params.suppressed_token_ids leaves no token to sample"
    ends = itertools.accumulate(lengths)
    banned = {params.bad_word_token_ids[end - 1] for end, length in zip(ends, lengths, strict=True) if length == 1}
    allowed = set(params.allowed_token_ids)

    def leaves_none(left_out: set[int]) -> bool:
        return not allowed - left_out if allowed else len(left_out) >= num_sampled

    if leaves_none(banned):
        return "params.allowed_token_ids and params.bad_word_token_ids leave no token to sample"
    if params.min_token_count and not params.grammar and leaves_none(banned | suppressed):
        return "params.suppressed_token_ids leaves no token to sample of those that are allowed"
    return None


def _beam_problem(params: pb.SequenceParams) -> str | None:
    """What beams cannot have: their candidates are ranked by the model's own log-probabilities."""
    if not params.candidate_count:
        return None
    for name in (
        "presence_penalty",
        "frequency_penalty",
        "logit_bias_token_ids",
        "allowed_token_ids",
        "bad_word_token_ids",
        "grammar",
    ):
        if getattr(params, name):
            return f"params.{name} cannot be combined with params.candidate_count"
    if params.repetition_penalty not in (0.0, 1.0):
        return "params.repetition_penalty cannot be combined with params.candidate_count"
    return None


def tokens_problem(tokens: TokenArray, prompt_len: int, vocab_size: int, max_len: int) -> str | None:
    """Why a sequence cannot have these tokens, for people; None if it can. tokens: int32, ids beyond 2^31 negative."""
    if not 1 <= prompt_len <= len(tokens):
        return f"prompt_token_count is {prompt_len} for {len(tokens)} tokens"
    if len(tokens) > max_len:
        return f"{len(tokens)} tokens are more than the model's {max_len}"
    bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(bad):
        token_id = int(tokens[bad[0]]) % (1 << 32)
        return f"token {token_id} at position {int(bad[0])} is not in the vocabulary of {vocab_size}"
    return None
