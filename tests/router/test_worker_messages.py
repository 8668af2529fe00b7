"""Plans as messages: each rule for tokens has its field, and of what nobody asked nothing is sent."""

from __future__ import annotations

import pytest

from octavo.worker.v1 import worker_pb2 as pb
from octavo_router.plan import NewSequence, SequenceParams, StepPlan
from octavo_router.request import NO_RULES, TokenRules
from octavo_router.worker_messages import plan_message


def params_message(rules: TokenRules) -> pb.SequenceParams:
    params = SequenceParams(
        temperature=0.5,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=7,
        return_logprobs=False,
        top_logprob_count=0,
        suppressed_token_ids=(),
        min_token_count=0,
        rules=rules,
    )
    new = NewSequence(sequence_id=1, prompt_token_count=1, token_ids=[5], params=params)
    (message,) = plan_message(StepPlan(epoch=1, step_seq=1, new_sequences=[new])).new_sequences
    return message.params


def test_every_rule_has_its_field() -> None:
    rules = TokenRules(
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias=((3, -100.0), (9, 2.5)),
        allowed_token_ids=(3, 4),
        bad_words=((1, 2, 3), (4,)),
        grammar='{"grammars": []}',
    )
    assert params_message(rules) == pb.SequenceParams(
        temperature=0.5,
        top_p=1.0,
        seed=7,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias_token_ids=[3, 9],
        logit_biases=[-100.0, 2.5],
        allowed_token_ids=[3, 4],
        bad_word_token_ids=[1, 2, 3, 4],
        bad_word_lengths=[3, 1],
        grammar='{"grammars": []}',
    )


@pytest.mark.parametrize("rules", [NO_RULES, TokenRules()])
def test_no_rules_are_no_bytes(rules: TokenRules) -> None:
    assert params_message(rules) == pb.SequenceParams(temperature=0.5, top_p=1.0, seed=7)
