"""Log-probabilities of prompts, from the columns that a worker sends to the stream: whatever happens, each token's come
once.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from octavo.errors import GenerationError
from octavo_router.plan import LogprobColumns, PromptLogprobs, StepResult
from octavo_router.prompt_logprobs import PromptScores
from octavo_router.request import Beams, FinishReason, Request, TokenLogprobs, Usage
from octavo_router.results import PromptComputed, ProtocolError
from tests.router.fake_worker import POISON, expected_hypotheses, expected_output, expected_prompt_scores
from tests.router.harness import Harness, make_limits, make_request
from tests.router.test_engine import read_ok, serving, until


def columns_of(*logprobs: float) -> LogprobColumns:
    """Each with as many likeliest tokens as its place in the list, counted from 0."""
    counts = list(range(len(logprobs)))
    ids = [10 * row + rank for row, count in enumerate(counts) for rank in range(count)]
    return LogprobColumns(list(logprobs), counts, ids, [float(token_id) for token_id in ids])


def scored(request_id: str = "A", num_prompt: int = 21, max_tokens: int = 3, **options: Any) -> Request:
    return make_request(request_id, num_prompt, max_tokens, **{"prompt_logprobs": 2, **options})


def scores_of(harness: Harness, request: Request) -> list[TokenLogprobs]:
    scores = harness.groups[request.request_id].prompt_scores
    assert scores is not None
    assert scores.is_complete
    return list(scores.entries(request.prompt_token_ids))


def check(harness: Harness, *requests: Request) -> None:
    """Everything came: the scores once, and the tokens."""
    for request in requests:
        assert scores_of(harness, request) == expected_prompt_scores(request)
        events = [event for event in harness.events if isinstance(event, PromptComputed)]
        assert sum(event.group is harness.groups[request.request_id] for event in events) == 1
        for index in range(request.sampling.n if request.stopping.max_tokens else 0):
            assert harness.delivered(request.request_id, index) == expected_output(request, index)[0]
    assert harness.num_used == 0


# The collection


def test_stretches_are_joined_and_what_comes_again_is_dropped() -> None:
    scores = PromptScores(6)
    assert not scores.add(1, columns_of(-1.0, -2.0))
    assert not scores.add(1, columns_of(-1.0, -2.0))
    assert not scores.add(2, columns_of(-7.0, -3.0, -4.0))
    assert (scores.num_scored, scores.is_complete) == (4, False)
    assert scores.add(4, columns_of(-7.0, -5.0))
    assert not scores.add(1, columns_of(-1.0, -2.0, -3.0, -4.0, -5.0)), "it was complete before"
    entries = list(scores.entries([9, 1, 2, 3, 4, 5]))
    assert [(entry.token_id, entry.logprob) for entry in entries] == [(1, -1), (2, -2), (3, -3), (4, -4), (5, -5)]
    assert [entry.top for entry in entries] == [
        (), ((10, 10.0),), ((10, 10.0),), ((20, 20.0), (21, 21.0)), ((10, 10.0),),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("start_position", "columns", "message"),
    [
        (0, columns_of(-1.0), "tokens 0 to 0 are scored; 1 to 3 are due"),
        (2, columns_of(-1.0), "tokens 2 to 2 are scored; 1 to 3 are due"),
        (1, columns_of(-1.0, -1.0, -1.0, -1.0), "tokens 1 to 4 are scored; 1 to 3 are due"),
        (1, LogprobColumns([-1.0], [], [], []), "0 counts came for 1 tokens"),
        (1, LogprobColumns([-1.0], [2], [5], [-1.0]), "1 likeliest tokens came, 2 are counted"),
        (1, LogprobColumns([-1.0], [1], [5], []), "1 likeliest tokens came, 1 are counted"),
    ],
)
def test_a_stretch_that_does_not_fit(start_position: int, columns: LogprobColumns, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptScores(4).num_after(start_position, columns)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    scores = PromptScores(1)
    assert scores.is_complete
    assert list(scores.entries([7])) == []


# The scheduler


@pytest.mark.parametrize("num_prompt", [1, 2, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("max_num_tokens", [1, 7, 8, 16, 64])
def test_chunks_lose_nothing(num_prompt: int, max_num_tokens: int) -> None:
    harness = Harness(make_limits(max_num_tokens=max_num_tokens))
    request = scored(num_prompt=num_prompt)
    harness.add(request)
    harness.run()
    assert scores_of(harness, request) == expected_prompt_scores(request)
    assert harness.output("A") == expected_output(request)[0]


def test_the_prefix_cache_is_written_and_not_read() -> None:
    """Two full blocks and the same again: nothing of a scored prompt is taken, everything of it is kept."""
    harness = Harness(make_limits())
    for name in ("A", "B"):
        request = scored(name, num_prompt=8, max_tokens=1, cache_salt="shared")
        harness.add(request)
        harness.run()
        assert harness.groups[name].num_cached_tokens == 0
        assert scores_of(harness, request) == expected_prompt_scores(request)
    harness.add(make_request("C", num_prompt=8, max_tokens=1, cache_salt="shared"))
    harness.run()
    assert harness.groups["C"].num_cached_tokens == 4


@pytest.mark.parametrize("other", [make_request("B", 21, 3, cache_salt="shared"), scored("B", cache_salt="shared")])
def test_nobody_is_waited_for(other: Request) -> None:
    """Whoever computes the same prompt: it is not going to be taken from them."""
    harness = Harness(make_limits())
    harness.add(other)
    harness.add(scored("A", cache_salt="shared"))
    plan = harness.send()
    assert plan is not None
    assert (plan.start_positions, plan.token_counts) == ([0, 0], [21, 21])
    harness.run()
    check(harness, scored("A", cache_salt="shared"))


def press(harness: Harness, request: Request) -> None:
    """Lets the request give up its blocks in the middle of its prompt: the one before it grows into them."""
    harness.add(make_request("first", num_prompt=6, max_tokens=60, first_token=30))
    harness.step()
    harness.add(request)
    while not harness.scheduler.num_preemptions:
        assert harness.step()
    assert 0 < harness.groups[request.request_id].prompt_scores.num_scored < len(request.prompt_token_ids) - 1  # type: ignore[union-attr]


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_preempted_in_the_middle_of_the_prompt(swaps: bool, max_tokens: int) -> None:
    limits = make_limits(num_blocks=17, max_num_tokens=2, num_host_blocks=20 * swaps, swaps=swaps)
    harness = Harness(limits)
    request = scored(num_prompt=50, max_tokens=max_tokens)
    press(harness, request)
    harness.run()
    counts = harness.scheduler.counts
    assert bool(counts.num_swap_preemptions) == swaps
    assert bool(counts.num_recompute_preemptions) != swaps
    check(harness, request)


def test_what_is_scored_may_come_from_the_cache_when_it_is_computed_again() -> None:
    harness = Harness(make_limits(max_num_tokens=8))
    request = scored(num_prompt=30)
    harness.add(request)
    harness.step()
    harness.step()
    group = harness.groups["A"]
    (sequence,) = group.running
    assert group.prompt_scores is not None
    while sequence.num_plans:
        harness.answer()
    num_scored = group.prompt_scores.num_scored
    harness.scheduler.batch.preempt([sequence])
    plan = harness.send()
    assert plan is not None
    assert plan.start_positions == [num_scored // 4 * 4]
    harness.run()
    check(harness, request)


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_the_worker_is_lost_at_any_time(num_steps: int, max_tokens: int) -> None:
    harness = Harness(make_limits(max_num_tokens=8))
    request = scored(num_prompt=30, max_tokens=max_tokens)
    harness.add(request)
    for _ in range(num_steps):
        harness.step()
    harness.disconnect()
    harness.connect()
    harness.run()
    check(harness, request)


@pytest.mark.parametrize("best_of", [3, 5])
def test_one_sample_computes_the_prompt_for_all(best_of: int) -> None:
    harness = Harness(make_limits(max_num_tokens=16))
    request = scored(num_prompt=30, n=3, best_of=best_of)
    harness.add(request)
    plans = []
    while (plan := harness.send()) is not None or harness.in_flight:
        if plan is None:
            harness.answer()
        else:
            plans.append(plan)
    check(harness, request)
    assert [start for plan in plans for start in plan.start_positions].count(0) == 1


def test_beams_have_their_prompt_scored() -> None:
    harness = Harness(make_limits(max_num_tokens=16))
    request = scored(num_prompt=30, max_tokens=5, beams=Beams(3))
    harness.add(request)
    harness.run()
    assert harness.hypotheses("A") == expected_hypotheses(request)
    assert scores_of(harness, request) == expected_prompt_scores(request)


@pytest.mark.parametrize("prompt_logprobs", [None, 0, 2])
@pytest.mark.parametrize("num_prompt", [1, 4, 21, 40])
@pytest.mark.parametrize("n", [1, 3])
def test_no_token_is_generated(prompt_logprobs: int | None, num_prompt: int, n: int) -> None:
    harness = Harness(make_limits(max_num_tokens=16))
    request = make_request("A", num_prompt, 0, n=n, prompt_logprobs=prompt_logprobs, cache_salt="shared")
    harness.add(request)
    harness.run()
    (event,) = harness.events
    assert event == PromptComputed(harness.groups["A"], is_end=True)
    assert harness.num_used == 0
    assert harness.worker.sequences == {}
    if prompt_logprobs is not None:
        assert scores_of(harness, request) == expected_prompt_scores(request)
    harness.add(make_request("B", num_prompt, 1, cache_salt="shared"))
    harness.run()
    assert harness.groups["B"].num_cached_tokens == (num_prompt - 1) // 4 * 4


@pytest.mark.parametrize("max_num_tokens", [3, 4, 5])
def test_a_prompt_ends_when_its_last_token_is_computed(max_num_tokens: int) -> None:
    """Not when its log-probabilities are complete, for which the token before is enough."""
    harness = Harness(make_limits(max_num_tokens=max_num_tokens, max_plans_in_flight=1))
    for num_prompt in range(1, 14):
        request = scored(f"R{num_prompt}", num_prompt=num_prompt, max_tokens=0)
        harness.add(request)
        harness.run()
        assert [event for event in harness.events if isinstance(event, PromptComputed)][num_prompt - 1 :] == [
            PromptComputed(harness.groups[request.request_id], is_end=True)
        ]
        assert harness.num_used == 0


def test_a_prompt_may_fill_the_whole_pool_where_nothing_follows() -> None:
    harness = Harness(make_limits(num_blocks=5, max_model_len=20))
    request = scored(num_prompt=20, max_tokens=0)
    harness.add(request)
    harness.run()
    check(harness, request)


@pytest.mark.parametrize(
    ("stretches", "message"),
    [
        ([], "brought too little of the prompt of 1"),
        ([PromptLogprobs(1, 1, columns_of(-1.0, -1.0))], "brought too little of the prompt of 1"),
        ([PromptLogprobs(1, 2, columns_of(-1.0))], "a prompt that does not fit: tokens 2 to 2 are scored"),
        ([PromptLogprobs(9, 1, columns_of(-1.0))], "brought the prompt of sequence 9, unasked"),
        ([PromptLogprobs(2, 1, columns_of(-1.0))], "brought the prompt of sequence 2, unasked"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(stretches: list[PromptLogprobs], message: str) -> None:
    harness = Harness(make_limits())
    harness.add(scored(num_prompt=6))
    harness.add(make_request("B", num_prompt=6, first_token=20))
    harness.send()
    result = harness.worker.execute(harness.in_flight.popleft())
    with pytest.raises(ProtocolError, match=message):
        harness.scheduler.apply(dataclasses.replace(result, prompt_logprobs=stretches))
    assert harness.groups["A"].prompt_scores.num_scored == 0  # type: ignore[union-attr]


def test_what_is_still_coming_of_a_cancelled_prompt_is_dropped() -> None:
    harness = Harness(make_limits(max_num_tokens=8))
    harness.add(scored(num_prompt=30))
    harness.add(make_request("B", num_prompt=4, max_tokens=9, first_token=30))
    harness.send()
    harness.send()
    harness.cancel("A")
    harness.run()
    assert harness.groups["A"].prompt_scores.num_scored == 0  # type: ignore[union-attr]
    assert harness.output("B") == expected_output(make_request("B", num_prompt=4, max_tokens=9, first_token=30))[0]


def test_a_failing_prompt_owes_nothing() -> None:
    harness = Harness(make_limits())
    request = scored(num_prompt=6, first_token=POISON - 5)
    harness.add(request)
    harness.run()
    assert harness.failure("A") == "the prompt is poisoned"


@pytest.mark.parametrize("seed", range(20))
def test_anything_may_happen_at_once(seed: int) -> None:
    """Scored and other prompts with shared beginnings, little memory, and a worker that dies now and then."""
    rng = random.Random(seed)
    swaps = seed % 2 == 0
    limits = make_limits(num_blocks=24, max_num_tokens=rng.choice([5, 8, 16]), num_host_blocks=30 * swaps, swaps=swaps)
    harness = Harness(limits)
    requests = []
    for index in range(14):
        is_scored = rng.random() < 0.6
        request = make_request(
            f"R{index}", rng.randrange(1, 60), rng.randrange(0 if is_scored else 1, 12), n=rng.choice([1, 1, 2]),
            prompt_logprobs=rng.randrange(3) if is_scored else None, cache_salt="shared", seed=index,
        )  # fmt: skip
        requests.append(request)
        harness.add(request)
        for _ in range(rng.randrange(6)):
            harness.step()
        if rng.random() < 0.1:
            harness.disconnect()
            harness.connect()
    harness.run()
    for request in requests:
        if request.output.prompt_logprobs is not None:
            assert scores_of(harness, request) == expected_prompt_scores(request)
        for index in range(request.sampling.n if request.stopping.max_tokens else 0):
            assert harness.delivered(request.request_id, index) == expected_output(request, index)[0]
    assert harness.num_used == 0


# The stream


async def test_the_prompts_entries_come_once_it_is_computed() -> None:
    request = scored()
    async with serving() as router:
        router.client.answering.clear()
        stream = router.submit(request)
        await until(lambda: len(router.client.plans) == 2)
        router.client.answering.set()
        assert list(await stream.prompt_logprobs()) == expected_prompt_scores(request)
        answer = await read_ok(stream)
    assert answer.only.token_ids == expected_output(request)[0]


async def test_the_entries_of_a_prompt_whose_worker_dies() -> None:
    request = scored(num_prompt=60, max_tokens=4)
    async with serving(max_num_batched_tokens=8) as router:
        num_answered = 0

        def die_once(result: StepResult) -> StepResult:
            nonlocal num_answered
            num_answered += 1
            if num_answered == 3:
                router.client.kill()
            return result

        router.client.alter = die_once
        stream = router.submit(request)
        assert list(await stream.prompt_logprobs()) == expected_prompt_scores(request)
        answer = await read_ok(stream)
        assert answer.only.token_ids == expected_output(request)[0]
        assert router.worker_state.lost_session_count == 1
        await router.until_idle()


async def test_an_error_before_the_prompt_is_computed_is_raised() -> None:
    async with serving() as router:
        stream = router.submit(scored(num_prompt=6, first_token=POISON - 5))
        with pytest.raises(GenerationError, match="poisoned"):
            await stream.prompt_logprobs()


async def test_a_request_for_nothing_but_its_prompt() -> None:
    async with serving() as router:
        request = scored(num_prompt=9, max_tokens=0, n=2)
        stream = router.submit(request)
        assert list(await stream.prompt_logprobs()) == expected_prompt_scores(request)
        answer = await read_ok(stream)
        assert {index: sample.finish_reason for index, sample in answer.samples.items()} == {
            0: FinishReason.LENGTH, 1: FinishReason.LENGTH,
        }  # fmt: skip
        assert not any(sample.token_ids or sample.text for sample in answer.samples.values())
        assert answer.usage == Usage(prompt_tokens=9, completion_tokens=0)
        await router.until_idle()


async def test_a_request_for_its_prompt_that_is_cancelled() -> None:
    async with serving() as router:
        router.client.answering.clear()
        stream = router.submit(scored(num_prompt=9, max_tokens=0))
        await router.client.sent.wait()
        stream.cancel()
        router.client.answering.set()
        await router.until_idle()
