from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.params import params_problem, tokens_problem


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"return_prompt_logprobs": True}, "return_prompt_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias_token_ids": [1], "logit_biases": [2.0]}, "logit_bias_token_ids"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_word_token_ids": [1], "bad_word_lengths": [1]}, "bad_word_token_ids"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"adapter": "mine"}, "adapter"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"suppressed_token_ids": [100]}, "suppressed_token_ids has 100; ids end at 95"),
        ({"suppressed_token_ids": list(range(96))}, "leaves no token"),
    ],
)
def test_what_is_not_offered_is_named(values: dict[str, Any], named: str) -> None:
    problem = params_problem(pb.SequenceParams(**values), 96)
    assert problem is not None
    assert named in problem


def test_offered_params() -> None:
    params = pb.SequenceParams(
        temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, seed=9, return_logprobs=True, top_logprob_count=5,
        suppressed_token_ids=[1, 2], min_token_count=3, repetition_penalty=1.0, candidate_count=8,
    )  # fmt: skip
    assert params_problem(params, 96) is None
    assert params_problem(pb.SequenceParams(), 96) is None


@pytest.mark.parametrize(
    ("tokens", "prompt_len", "problem"),
    [
        ([1, 2], 2, None),
        ([1, 2], 1, None),
        ([], 0, "prompt_token_count is 0 for 0 tokens"),
        ([1], 2, "prompt_token_count is 2 for 1 tokens"),
        ([1] * 9, 1, "9 tokens are more than the model's 8"),
        ([1, 96], 1, "token 96 at position 1 is not in the vocabulary of 96"),
        ([1, -1], 1, "token 4294967295 at position 1"),
    ],
)
def test_tokens(tokens: list[int], prompt_len: int, problem: str | None) -> None:
    found = tokens_problem(np.array(tokens, np.int32), prompt_len, 96, 8)
    assert (found is None) == (problem is None)
    assert problem is None or problem in (found or "")
