"""Beam search gives transformers' hypotheses, token for token, however it is scheduled.

Every decision of the reference searches has a margin above 1e-3 in log-probability, so equality has no exceptions here.
`make test` runs each prompt with one of the nine settings, `make test-full` with all of them.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.v1 import inference_pb2, sampling_pb2
from tests.e2e.harness import FINISH_REASONS, REFERENCES, Reference, Server, request_of, running, wait_until

MIN_MARGIN = 1e-3
LOGPROB_TOLERANCE = 2e-3
CONCURRENCY = 8
GREEDY_TOKENS = 24
EARLY_STOPPING = {
    "false": sampling_pb2.BEAM_EARLY_STOPPING_FALSE,
    "true": sampling_pb2.BEAM_EARLY_STOPPING_TRUE,
    "never": sampling_pb2.BEAM_EARLY_STOPPING_NEVER,
}
FILE = json.loads((REFERENCES / "beams" / "smollm2-135m-instruct.json").read_text(encoding="utf-8"))
BEAM_WIDTH, MAX_TOKENS = FILE["beam_width"], FILE["max_tokens"]
EOS_TOKEN_IDS = frozenset(FILE["eos_token_ids"])


@dataclass(frozen=True)
class Hypothesis:
    """A beam that has ended: its tokens, the sum of their log-probabilities, and why it ended."""

    token_ids: list[int]
    logprob: float
    finish_reason: str


@dataclass(frozen=True)
class Search:
    """A reference search; tests/references/README.md describes the fields."""

    prompt_name: str
    prompt_token_ids: list[int] = field(repr=False)
    length_penalty: float
    early_stopping: str
    num_steps: int
    margin: float
    hypotheses: list[Hypothesis] = field(repr=False)


def load_searches() -> list[list[Search]]:
    """The reference searches, a list a prompt."""
    prompts = []
    for entry in FILE["references"]:
        hypotheses = [
            Hypothesis(**known, finish_reason="stop" if known["token_ids"][-1] in EOS_TOKEN_IDS else "length")
            for known in entry["hypotheses"]
        ]
        prompts.append(
            [
                Search(
                    prompt_name=entry["name"],
                    prompt_token_ids=entry["prompt_token_ids"],
                    length_penalty=search["length_penalty"],
                    early_stopping=search["early_stopping"],
                    num_steps=search["num_steps"],
                    margin=search["margin"],
                    hypotheses=[hypotheses[index] for index in search["hypotheses"]],
                )
                for search in entry["searches"]
            ]
        )
    return prompts


SEARCHES = load_searches()
PART = [searches[index % len(searches)] for index, searches in enumerate(SEARCHES)]
LONG = [search for search in PART if search.num_steps == MAX_TOKENS]
ALL = [search for searches in SEARCHES for search in searches]


def request_for(search: Search, n: int = BEAM_WIDTH, **options: Any) -> inference_pb2.GenerateRequest:
    beam_search = sampling_pb2.BeamSearch(
        beam_width=BEAM_WIDTH,
        length_penalty=search.length_penalty,
        early_stopping=EARLY_STOPPING[search.early_stopping],
    )
    return request_of(
        search.prompt_token_ids, max_tokens=MAX_TOKENS, ignore_eos=False, n=n, beam_search=beam_search, **options
    )


def ask(server: Server, request: inference_pb2.GenerateRequest) -> list[Hypothesis]:
    """The hypotheses that a request brings, in order of their sample index: all in the last response."""
    *earlier, last = server.start(request)
    assert not any(response.deltas for response in earlier)
    assert [delta.sample_index for delta in last.deltas] == list(range(request.sampling.n))
    assert last.usage.completion_token_count == sum(len(delta.token_ids) for delta in last.deltas)
    return [
        Hypothesis(list(delta.token_ids), delta.cumulative_logprob, FINISH_REASONS[delta.finish_reason])
        for delta in last.deltas
    ]


def check_equal(search: Search, hypotheses: Sequence[Hypothesis]) -> None:
    """Compares a search's answer with the reference; names the first hypothesis that differs."""
    for rank, (got, want) in enumerate(zip(hypotheses, search.hypotheses, strict=True)):
        assert got.token_ids == want.token_ids, f"{search} differs at hypothesis {rank}"
        assert got.finish_reason == want.finish_reason, f"{search}, hypothesis {rank}"
        assert got.logprob == pytest.approx(want.logprob, abs=LOGPROB_TOLERANCE), f"{search}, hypothesis {rank}"


def check_all(server: Server, searches: Sequence[Search], concurrency: int = CONCURRENCY) -> None:
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda search: ask(server, request_for(search)), searches))
    for search, hypotheses in zip(searches, answers, strict=True):
        check_equal(search, hypotheses)


def test_references_are_what_they_should_be() -> None:
    """16 prompts, 4 beams, 48 tokens, 9 settings; no near-ties; early_stopping and ends matter."""
    assert (len(SEARCHES), BEAM_WIDTH, MAX_TOKENS) == (16, 4, 48)
    for searches in SEARCHES:
        settings = {(search.length_penalty, search.early_stopping) for search in searches}
        assert settings == {(penalty, early) for penalty in (0.5, 1.0, 2.0) for early in EARLY_STOPPING}
    assert min(search.margin for search in ALL) > MIN_MARGIN
    assert sum(len({search.num_steps for search in searches}) > 1 for searches in SEARCHES) >= 8
    assert sum(len({str(search.hypotheses) for search in searches}) > 1 for searches in SEARCHES) >= 8
    assert {reason.finish_reason for search in ALL for reason in search.hypotheses} == {"stop", "length"}


def test_part_equals_transformers(server: Server) -> None:
    check_all(server, PART)
    server.wait_idle()


def test_best_n_of_the_beams_come_back(server: Server) -> None:
    search = PART[0]
    assert ask(server, request_for(search, n=BEAM_WIDTH))[:2] == ask(server, request_for(search, n=2))


def test_beams_and_samples_do_not_touch_each_other(server: Server, references: list[Reference]) -> None:
    """Searches run in the same steps as greedy requests, which come to the same bits as without them."""
    chosen = [reference for reference in references if len(reference.prompt_token_ids) < 100][:4]
    prompts = [reference.prompt_token_ids for reference in chosen]
    alone = server.generate_all(prompts, 4, max_tokens=GREEDY_TOKENS, logprobs=2)
    with ThreadPoolExecutor(1) as pool:
        beams = pool.submit(check_all, server, PART[:4], 4)
        beside = server.generate_all(prompts, 4, max_tokens=GREEDY_TOKENS, logprobs=2)
        beams.result()
    assert [answer.bits() for answer in beside] == [answer.bits() for answer in alone]


def test_part_is_the_same_in_small_chunks_and_blocks() -> None:
    """Forks that fall on and between the borders of blocks of 8, prompts cut into chunks of 16."""
    with running(max_num_batched_tokens=16, block_size=8, num_device_blocks=600) as server:
        check_all(server, PART[:6])
        server.wait_idle()


@pytest.mark.parametrize("swap_space", [0, 1])
def test_long_ones_are_the_same_where_groups_are_preempted(swap_space: int) -> None:
    """A pool for one search and a half, and six at once: groups give way as a whole, and come back by computing all
    anew or, where that is quicker, from the host."""
    with running(block_size=8, num_device_blocks=36, max_model_len=256, swap_space=swap_space) as server:
        check_all(server, LONG[:6], 6)
        assert server.metric("octavo_preemptions_total") > 0
        server.wait_idle()


def test_searches_survive_their_worker() -> None:
    """It is killed when the beams hold blocks of their own, well before the 48th token; a new one rebuilds them all."""
    with running() as server, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(check_all, server, LONG[:2], 2)
        wait_until(lambda: server.used_blocks() >= 14, 60, lambda: "the beams took no blocks")
        os.kill(server.pair.pids()["worker"], signal.SIGKILL)
        answers.result()
        assert server.state().workers[0].lost_session_count == 1
        server.wait_idle()


@pytest.mark.full
def test_all_equal_transformers(server: Server) -> None:
    check_all(server, ALL)
    server.wait_idle()
