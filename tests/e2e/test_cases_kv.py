"""What other servers' users reported about the prefix cache, preemption and swapping, tried on this one.

Each test names the report it stands for (BR-…) and what went wrong there. They go through HTTP, as the reports' authors
did. Where the words do not matter a tiny random model answers; the default model has prompts of English text.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.completions import BLOCK_SIZE, Caller, cached_tokens, random_prompt
from tests.e2e.harness import CALL_TIMEOUT_S, Reference, running
from tests.e2e.streams import HttpStream
from tests.e2e.test_equality import check_equals_reference


@pytest.fixture(scope="module")
def swapping(tiny_model: dict[str, Any]) -> Iterator[Caller]:
    """A tiny model with 1,600 tokens of KV memory on the device, and more on the host. Nothing is cached."""
    with running(**tiny_model, num_device_blocks=100, swap_space=0.25, enable_prefix_caching=False) as own:
        yield Caller(own)


# KV: paged memory and the prefix cache


def test_br002_the_same_prompt_gives_the_same_text_every_time(
    caller: Caller, uncached: Caller, english: list[int]
) -> None:
    """BR-002: the second call with prefix caching gave another text."""
    prompt = english[:70]
    answers = [caller.answer(prompt, 32, cache_salt="br002") for _ in range(3)]
    answers += caller.answers([prompt] * 8, 32, cache_salt="br002")
    assert answers == [uncached.answer(prompt, 32)] * 11


def test_br003_a_hit_is_as_right_as_a_miss(
    caller: Caller, uncached: Caller, references: list[Reference], english: list[int]
) -> None:
    """BR-003: prefill that began behind a cached prefix used wrong positions."""
    short, long = english[: 5 * BLOCK_SIZE + 3], english[: 5 * BLOCK_SIZE + 23]
    for prompt in (short, long, short):
        assert caller.answer(prompt, 16, cache_salt="br003") == uncached.answer(prompt, 16)
    reference = next(reference for reference in references if reference.name == "english_700")
    whole = caller.server.reply(reference.prompt_token_ids, max_tokens=16, logprobs=0, cache_salt="br003")
    assert whole.usage.cached_token_count >= 5 * BLOCK_SIZE
    check_equals_reference(caller.server, reference, whole.answers[0])


@pytest.mark.parametrize("num_tokens", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_br004_a_prompt_of_full_cached_blocks_is_answered_again(
    caller: Caller, english: list[int], num_tokens: int
) -> None:
    """BR-004: with the whole prompt cached there was nothing left to compute, and the second call failed."""
    prompt = english[200 : 200 + num_tokens]
    options = {"logprobs": 2, "cache_salt": f"br004 {num_tokens}"}
    first, second = (caller.complete(prompt, 1, **options) for _ in range(2))
    assert first["choices"] == second["choices"]
    assert cached_tokens(first) == 0
    assert BLOCK_SIZE <= cached_tokens(second) < num_tokens


def test_br007_a_warm_cache_moves_no_probability(caller: Caller, english: list[int]) -> None:
    """BR-007: the margin between the two likeliest tokens moved once the cache was warm."""
    context, options = english[300:380], {"logprobs": 2, "cache_salt": "br007"}
    fresh = caller.complete(context, 1, **options)["choices"]
    caller.answers([context[: 20 + 3 * i] + english[i : 10 + i] for i in range(20)], 4, cache_salt="br007")
    assert caller.complete(context, 1, **options)["choices"] == fresh


@pytest.mark.parametrize(
    ("num_requests", "num_common", "num_blocks"),
    [pytest.param(5, 120, 20, id="part"), pytest.param(32, 600, 90, id="all", marks=pytest.mark.full)],
)
def test_br008_large_batches_with_a_common_head_and_evictions(
    uncached: Caller, english: list[int], num_requests: int, num_common: int, num_blocks: int
) -> None:
    """BR-008: prefix caching with large batches and long prompts sometimes gave garbage."""
    rng = random.Random(8)
    prompts = [english[:num_common] + random_prompt(rng, 20, range(300, 10_000)) for _ in range(num_requests)]
    alone = [uncached.answer(prompt) for prompt in prompts]
    with running(num_device_blocks=num_blocks, swap_space=0.0) as own:
        small = Caller(own)
        for _ in range(2):
            assert small.answers(prompts) == alone
        assert own.metric("octavo_prefix_cache_evictions_total") > 0
        own.wait_idle()


def test_br010_finished_requests_hold_nothing(pressed: Caller) -> None:
    """BR-010: the KV of finished requests stayed held until new ones waited for ever."""
    rng = random.Random(10)
    for _ in range(200):
        pressed.complete(random_prompt(rng, 200), 1)
        assert pressed.server.state().queue.request_count == 0
    pressed.server.wait_idle()


def test_br011_samples_do_not_overwrite_each_other(caller: Caller, english: list[int]) -> None:
    """BR-011: with n > 1 some choices were empty or repeated another's text."""
    options = {"n": 3, "temperature": 1, "seed": 7}
    choices = caller.complete(english[:40], 24, **options)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    texts = [choice["text"] for choice in choices]
    assert all(texts)
    assert len(set(texts)) == 3
    assert streamed_texts(caller, english[:40], 24, **options) == texts


def streamed_texts(caller: Caller, prompt: list[int], max_tokens: int, **options: Any) -> list[str]:
    """The choices' texts as a stream brings them."""
    texts: dict[int, str] = {}
    response = caller.post(prompt, max_tokens, stream=True, **options)
    for line in response.text.split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


def test_br012_the_second_call_reports_its_hit(caller: Caller) -> None:
    """BR-012: the cache was on and the hit rate stayed at 0 %."""
    words = " ".join(f"word{i}" for i in range(36))
    body = {
        "messages": [{"role": "user", "content": f"Repeat: {words}"}],
        "max_tokens": 4,
        "temperature": 0,
        "cache_salt": "br012",
    }
    url = f"{caller.server.http_url}/v1/chat/completions"
    before = caller.server.metric("octavo_prefix_cache_hits_total")
    first, second = (httpx.post(url, json=body, timeout=CALL_TIMEOUT_S).json() for _ in range(2))
    num_prompt_tokens = first["usage"]["prompt_tokens"]
    assert num_prompt_tokens >= 120
    assert cached_tokens(first) == 0
    assert cached_tokens(second) == (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert caller.server.metric("octavo_prefix_cache_hits_total") == before + cached_tokens(second)


def test_br013_salts_part_the_cache(caller: Caller, english: list[int]) -> None:
    """BR-013: a shared cache told one tenant what another had sent; keys could collide."""
    prompt = english[400:480]
    counts = [
        cached_tokens(caller.complete(prompt, 1, cache_salt=salt))
        for salt in ("br013 a", "br013 b", "br013 a", "br013 a ", "br013 ", "br013 b")
    ]
    assert counts == [0, 0, 4 * BLOCK_SIZE, 0, 0, 4 * BLOCK_SIZE]


# PREEMPT: preemption, swap, capacity


def test_br015_a_prompt_as_large_as_the_pool(tiny_model: dict[str, Any]) -> None:
    """BR-015: a reserved block made the pool one block smaller than the check on arrival took it to be."""
    num_blocks = 8
    pool = num_blocks * BLOCK_SIZE
    with running(**tiny_model, num_device_blocks=num_blocks) as own:
        small = Caller(own)
        for num_tokens in (pool - BLOCK_SIZE, pool - 1):
            small.complete([5] * num_tokens, 1)
        refused = small.post([5] * pool, 1)
        assert refused.status_code == 400
        assert f"at most {pool} are possible" in refused.json()["error"]["message"]
        own.wait_idle()


def test_br017_swapping_does_not_stop_the_server(swapping: Caller) -> None:
    """BR-017: the server stopped answering the first time that blocks were swapped out."""
    check_swapping(swapping, num_requests=24)


@pytest.mark.full
def test_br017_swapping_does_not_stop_the_default_model() -> None:
    """BR-017 in a pool of two and a half sequences."""
    with running(num_device_blocks=30, swap_space=0.25, enable_prefix_caching=False) as own:
        check_swapping(Caller(own), num_requests=8)


def check_swapping(caller: Caller, num_requests: int) -> None:
    """Five rounds of requests that do not fit together; every block that went out came back."""
    rng, server = random.Random(17), caller.server
    for _ in range(5):
        answers = caller.answers([random_prompt(rng, 60) for _ in range(num_requests)], 120)
        assert [len(logprobs) for _, logprobs in answers] == [120] * num_requests
    server.wait_idle()
    came, went = (server.metric("octavo_kv_blocks_swapped_total", direction=way) for way in ("in", "out"))
    assert came == went > 0


def test_br018_a_full_swap_space_fails_nobody(tiny: Caller, tiny_model: dict[str, Any]) -> None:
    """BR-018: with the swap space full the engine gave up every request."""
    rng = random.Random(18)
    prompts = [random_prompt(rng, 60) for _ in range(8)]
    bytes_per_block = 2 * 2 * 2 * 16 * BLOCK_SIZE * 4  # K and V, layers, heads, head size, tokens, fp32
    expected = tiny.answers(prompts, 120)
    with running(**tiny_model, num_device_blocks=30, swap_space=2.5 * bytes_per_block / (1 << 30)) as own:
        assert own.state().workers[0].host_pool.block_count == 2
        assert Caller(own).answers(prompts, 120) == expected
        assert own.metric("octavo_preemptions_total", kind="recompute") > 0
        own.wait_idle()


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_br019_groups_of_eight_are_preempted(pressed: Caller, swapping: Caller, kind: str) -> None:
    """BR-019: a group with n = 8 that was preempted failed an assertion."""
    rng = random.Random(19)
    prompts = [random_prompt(rng, 250) for _ in range(40)]
    caller = swapping if kind == "swap" else pressed
    options = {"n": 8, "temperature": 1, "seed": 3, "logprobs": 0}
    with ThreadPoolExecutor(len(prompts)) as pool:
        bodies = list(pool.map(lambda prompt: caller.complete(prompt, 100, **options), prompts))
    for body in bodies:
        lengths = [len(choice["logprobs"]["token_logprobs"]) for choice in body["choices"]]
        assert lengths == [100] * 8
    assert caller.server.metric("octavo_preemptions_total", kind=kind) > 0
    caller.server.wait_idle()


def test_br020_a_long_request_is_not_pushed_back_by_later_ones(pressed: Caller) -> None:
    """BR-020: a preempted request lost its place to requests that had not started, and began again and again."""
    rng, server = random.Random(20), pressed.server
    expected = pressed.answer([7] * 40, 400)
    before = server.metric("octavo_preemptions_total")
    earlier = [HttpStream(server, random_prompt(rng, 200), max_tokens=200) for _ in range(5)]
    for stream in earlier:
        stream.wait_begun()
    long = HttpStream(server, [7] * 40, max_tokens=400)
    over = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        later = [pool.submit(keep_asking, pressed, random.Random(seed), over) for seed in range(6)]
        answer = long.finish()
        over.set()
        num_later = sum(future.result() for future in later)
    for stream in earlier:
        stream.finish()
    assert (answer.text, answer.logprobs) == expected
    assert num_later > 0
    num_requests = 1 + len(earlier) + num_later
    assert 0 < server.metric("octavo_preemptions_total") - before <= 5 * num_requests
    server.wait_idle()


def keep_asking(caller: Caller, rng: random.Random, over: threading.Event) -> int:
    """Sends short requests one behind the other until it is over; how many were answered."""
    count = 0
    while not over.is_set():
        caller.complete(random_prompt(rng, rng.randrange(1, 40)), rng.randrange(1, 30))
        count += 1
    return count
