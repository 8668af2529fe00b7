from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.params import params_problem, tokens_problem

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"adapter": "mine"}, "adapter is not offered"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; it must be from -2 to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
        ({"frequency_penalty": NAN}, "frequency_penalty is nan"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0; it must be above 0, or 0 for none"),
        ({"repetition_penalty": INF}, "repetition_penalty is inf"),
        ({"logit_bias_token_ids": [1]}, "logit_biases has 0 entries for 1 tokens"),
        ({"logit_biases": [1.0]}, "logit_biases has 1 entries for 0 tokens"),
        ({"logit_bias_token_ids": [96], "logit_biases": [1.0]}, "logit_bias_token_ids has 96; ids end at 95"),
        ({"logit_bias_token_ids": [4, 4], "logit_biases": [1.0, 2.0]}, "names a token twice"),
        ({"logit_bias_token_ids": [4], "logit_biases": [100.5]}, "logit_biases has 100.5"),
        ({"logit_bias_token_ids": [4], "logit_biases": [NAN]}, "logit_biases has nan"),
        ({"allowed_token_ids": [1, 96]}, "allowed_token_ids has 96; ids end at 95"),
        ({"bad_word_token_ids": [96], "bad_word_lengths": [1]}, "bad_word_token_ids has 96; ids end at 95"),
        ({"bad_word_token_ids": [1, 2], "bad_word_lengths": [1]}, "bad_word_lengths sums up to 1 for 2 tokens"),
        ({"bad_word_token_ids": [1, 2], "bad_word_lengths": [2, 0]}, "bad_word_lengths has a 0"),
        (
            {"allowed_token_ids": [1, 2], "bad_word_token_ids": [2, 3, 1], "bad_word_lengths": [1, 1, 1]},
            "allowed_token_ids and params.bad_word_token_ids leave no token",
        ),
        (
            {"bad_word_token_ids": list(range(96)), "bad_word_lengths": [1] * 96},
            "allowed_token_ids and params.bad_word_token_ids leave no token",
        ),
        ({"suppressed_token_ids": [100]}, "suppressed_token_ids has 100; ids end at 95"),
        ({"suppressed_token_ids": list(range(96))}, "leaves no token"),
        (
            {"suppressed_token_ids": [1, 2], "allowed_token_ids": [2], "min_token_count": 1},
            "suppressed_token_ids leaves no token to sample of those that are allowed",
        ),
        (
            {
                "suppressed_token_ids": list(range(50)),
                "bad_word_token_ids": list(range(40, 96)),
                "bad_word_lengths": [1] * 56,
                "min_token_count": 1,
            },
            "suppressed_token_ids leaves no token to sample of those that are allowed",
        ),
        ({"candidate_count": 2, "presence_penalty": 1.0}, "presence_penalty cannot be combined"),
        ({"candidate_count": 2, "frequency_penalty": 1.0}, "frequency_penalty cannot be combined"),
        ({"candidate_count": 2, "repetition_penalty": 1.1}, "repetition_penalty cannot be combined"),
        ({"candidate_count": 2, "logit_bias_token_ids": [1], "logit_biases": [1.0]}, "logit_bias_token_ids cannot"),
        ({"candidate_count": 2, "allowed_token_ids": [1]}, "allowed_token_ids cannot be combined"),
        ({"candidate_count": 2, "bad_word_token_ids": [1], "bad_word_lengths": [1]}, "bad_word_token_ids cannot"),
        ({"candidate_count": 2, "grammar": "start: /x/"}, "grammar cannot be combined with params.candidate_count"),
    ],
)
def test_what_cannot_be_served_is_named(values: dict[str, Any], named: str) -> None:
    problem = params_problem(pb.SequenceParams(**values), 96)
    assert problem is not None
    assert named in problem


def test_grammars_are_refused_where_there_are_none() -> None:
    params = pb.SequenceParams(grammar="start: /x/")
    assert params_problem(params, 96, has_grammars=False) == "params.grammar is not offered by this worker"
    assert params_problem(params, 96) is None


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 9},
        {
            "return_logprobs": True,
            "top_logprob_count": 5,
            "return_prompt_logprobs": True,
            "top_prompt_logprob_count": 2,
        },
        {"suppressed_token_ids": [1, 2], "min_token_count": 3, "repetition_penalty": 1.0, "candidate_count": 8},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
        {"logit_bias_token_ids": [0, 95], "logit_biases": [-100.0, 100.0]},
        {"allowed_token_ids": [0, 95, 95], "bad_word_token_ids": [0, 1, 95, 95], "bad_word_lengths": [1, 3]},
        {"suppressed_token_ids": [1, 2], "allowed_token_ids": [2], "min_token_count": 1, "grammar": "start: /x/"},
        {"suppressed_token_ids": [1, 2], "allowed_token_ids": [2]},
        {"bad_word_token_ids": list(range(95)), "bad_word_lengths": [1] * 95},
    ],
)
def test_offered_params(values: dict[str, Any]) -> None:
    assert params_problem(pb.SequenceParams(**values), 96) is None


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
