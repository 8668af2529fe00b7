"""Checks what a plan says about one new sequence: its tokens, and sampling parameters that this worker offers."""

from __future__ import annotations

import math

import numpy as np

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.sequences import TokenArray

# Fields of SequenceParams for which Describe would name a capability that this worker does not have.
_NOT_OFFERED = (
    "return_prompt_logprobs",
    "top_prompt_logprob_count",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias_token_ids",
    "logit_biases",
    "allowed_token_ids",
    "bad_word_token_ids",
    "bad_word_lengths",
    "grammar",
    "adapter",
)


def params_problem(params: pb.SequenceParams, num_sampled: int) -> str | None:
    """Why these parameters cannot be served, for people; None if they can. num_sampled: ids that may be sampled."""
    for name in _NOT_OFFERED:
        if getattr(params, name):
            return f"params.{name} is not offered by this worker"
    if params.repetition_penalty not in (0.0, 1.0):
        return "params.repetition_penalty is not offered by this worker"
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        return f"params.temperature is {params.temperature}; it must be 0 or more"
    if not (0 <= params.top_p <= 1 and 0 <= params.min_p <= 1):
        return f"params.top_p is {params.top_p} and params.min_p {params.min_p}; both must be from 0 to 1"
    if params.suppressed_token_ids:
        worst = max(params.suppressed_token_ids)
        if worst >= num_sampled:
            return f"params.suppressed_token_ids has {worst}; ids end at {num_sampled - 1}"
        if len(set(params.suppressed_token_ids)) >= num_sampled:
            return "params.suppressed_token_ids leaves no token to sample"
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
