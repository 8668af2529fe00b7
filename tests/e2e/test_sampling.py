"""Seeded sampling gives the same tokens however busy the server is, and sample i of a seed is seed + i."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.harness import Reference, Server, collect, request_of

SEED = 2024
NUM_TOKENS = 24
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01}


@pytest.fixture(scope="module")
def prompts(references: list[Reference]) -> list[list[int]]:
    return [reference.prompt_token_ids for reference in references if len(reference.prompt_token_ids) < 60][:16]


def test_same_seed_gives_same_tokens_at_any_concurrency(server: Server, prompts: list[list[int]]) -> None:
    options = {"max_tokens": NUM_TOKENS, "logprobs": 0, "seed": SEED, **SAMPLING}
    alone = server.generate_all(prompts, 1, **options)
    together = server.generate_all(prompts, len(prompts), **options)
    assert [answer.bits() for answer in together] == [answer.bits() for answer in alone]


def test_another_seed_gives_other_tokens(server: Server, prompts: list[list[int]]) -> None:
    one, other = (server.generate(prompts[0], max_tokens=NUM_TOKENS, seed=s, **SAMPLING) for s in (SEED, SEED + 1))
    assert one.token_ids != other.token_ids


def test_n_samples_are_requests_with_following_seeds(server: Server, prompts: list[list[int]]) -> None:
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 0, **SAMPLING}
    samples = collect(server.start(request_of(prompts[1], seed=SEED, n=3, **options)))
    with ThreadPoolExecutor(3) as pool:
        singles = list(pool.map(lambda i: server.generate(prompts[1], seed=SEED + i, **options), range(3)))
    assert [sample.bits() for sample in samples] == [single.bits() for single in singles]
    assert len({tuple(sample.token_ids) for sample in samples}) == 3


def test_a_drawn_seed_is_told_and_repeats_the_answer(server: Server, prompts: list[list[int]]) -> None:
    responses = list(server.start(request_of(prompts[2], max_tokens=NUM_TOKENS, **SAMPLING)))
    again = server.generate(prompts[2], max_tokens=NUM_TOKENS, seed=responses[0].prompt.seed, **SAMPLING)
    (first,) = collect(iter(responses))
    assert again.token_ids == first.token_ids
