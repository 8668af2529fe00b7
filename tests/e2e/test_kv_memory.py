"""What becomes of a request's KV memory does not show in its answer: preempted, swapped, cached, forked, lost.

"The same" is exact, in fp32: tokens, their log-probabilities and the likeliest alternatives, request by request, as the
server with room for everything gives them one at a time and behind a cold cache. Each test also shows that what it is
about did happen. `make test` runs a small fixed part, `make test-full` the larger one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.v1 import admin_pb2
from tests.e2e.harness import Answer, Reference, Server, collect, collect_reply, request_of, running
from tests.e2e.streams import GrpcStream, HttpStream, Stream, kill_worker_during

BLOCK_SIZE = 16
# GiB: host blocks for every sequence of a test (a block of the default model takes 720 KiB in fp32).
SWAP_SPACE = 0.25
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}


@dataclass(frozen=True)
class Size:
    """How much of everything: prompts of `num_prompt_tokens`, each asked once greedily and once with a seed."""

    num_prompts: int
    num_prompt_tokens: int
    num_tokens: int

    @property
    def blocks_per_sequence(self) -> int:
        return -(-(self.num_prompt_tokens + self.num_tokens) // BLOCK_SIZE)

    @property
    def small_pool(self) -> int:
        """Blocks for two and a half sequences."""
        return self.blocks_per_sequence * 5 // 2


SIZES = [
    pytest.param(Size(num_prompts=4, num_prompt_tokens=43, num_tokens=48), id="part"),
    pytest.param(Size(num_prompts=24, num_prompt_tokens=83, num_tokens=128), id="all", marks=pytest.mark.full),
]


@dataclass(frozen=True)
class Ask:
    """One request: a prompt and what to do with it."""

    prompt: list[int]
    options: dict[str, Any]


@pytest.fixture(scope="session")
def text_ids(references: list[Reference]) -> list[int]:
    """A thousand token ids of English text, for prompts to be cut from."""
    chosen = [reference for reference in references if reference.name.startswith("english")]
    token_ids = [token for reference in chosen for token in reference.prompt_token_ids]
    assert len(token_ids) > 700
    return token_ids


def cut_prompts(text_ids: Sequence[int], num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Different pieces of a text; they may overlap but none begins as another does."""
    stride = (len(text_ids) - num_tokens) // num_prompts
    assert stride > 0
    return [list(text_ids[i * stride : i * stride + num_tokens]) for i in range(num_prompts)]


def asks_of(text_ids: Sequence[int], size: Size) -> list[Ask]:
    """Every prompt, greedily and with a seed."""
    prompts = cut_prompts(text_ids, size.num_prompts, size.num_prompt_tokens)
    common: dict[str, Any] = {"max_tokens": size.num_tokens, "logprobs": 2}
    greedy = [Ask(prompt, common) for prompt in prompts]
    return greedy + [Ask(prompt, {**common, "seed": 100 + i, **SEEDED}) for i, prompt in enumerate(prompts)]


def answer_all(server: Server, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda ask: server.generate(ask.prompt, **ask.options), asks))


def cold_answers(server: Server, asks: Sequence[Ask]) -> list[Answer]:
    """The answers of a server with room for everything; a salt of its own keeps each request from every cache."""
    salted = [Ask(ask.prompt, {**ask.options, "cache_salt": f"cold {i}"}) for i, ask in enumerate(asks)]
    return answer_all(server, salted, 8)


def check_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Compares bit by bit; names the first request and step that differ."""
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        steps = zip(zip(*answer.bits(), strict=True), zip(*wanted.bits(), strict=True), strict=True)
        for step, (got, want) in enumerate(steps):
            assert got == want, f"request {number} differs at step {step}: {got} instead of {want}"
        assert answer.text == wanted.text
        assert answer.finish_reason == wanted.finish_reason


@contextmanager
def small_pool(size: Size, **settings: Any) -> Iterator[Server]:
    """A server whose pool holds two and a half sequences. Afterwards nothing may be held."""
    with running(num_device_blocks=size.small_pool, block_size=BLOCK_SIZE, **settings) as server:
        yield server
        server.wait_idle()


# Preemption

PREEMPTION = [
    pytest.param({"swap_space": 0.0, "enable_prefix_caching": False}, "recompute", id="recompute"),
    pytest.param({"swap_space": SWAP_SPACE, "enable_prefix_caching": True}, "swap", id="swap"),
    pytest.param(
        {"swap_space": 0.0, "enable_prefix_caching": True}, "recompute", id="recompute-cache", marks=pytest.mark.full
    ),
    pytest.param(
        {"swap_space": SWAP_SPACE, "enable_prefix_caching": False}, "swap", id="swap-no-cache", marks=pytest.mark.full
    ),
    pytest.param(
        {"swap_space": SWAP_SPACE, "max_plans_in_flight": 1}, "swap", id="swap-one-plan", marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("settings", "kind"), PREEMPTION)
def test_answers_are_the_same_in_a_pool_of_two_and_a_half_sequences(
    server: Server, text_ids: list[int], size: Size, settings: dict[str, Any], kind: str
) -> None:
    asks = asks_of(text_ids, size)
    expected = cold_answers(server, asks)
    with small_pool(size, **settings) as small:
        check_same(answer_all(small, asks, len(asks)), expected)
        assert small.metric("octavo_preemptions_total", kind=kind) > 0
        if kind == "swap":
            assert small.metric("octavo_kv_blocks_swapped_total", direction="in") > 0


@pytest.mark.parametrize("swap_space", [0.0, SWAP_SPACE], ids=["recompute", "swap"])
@pytest.mark.parametrize("size", [pytest.param(Size(6, 43, 48), id="all", marks=pytest.mark.full)])
def test_groups_of_samples_are_the_same_in_a_small_pool(
    server: Server, text_ids: list[int], size: Size, swap_space: float
) -> None:
    """Six requests of three samples in a pool that holds two and a half sequences: a group is preempted as a whole."""
    prompts = cut_prompts(text_ids, size.num_prompts, size.num_prompt_tokens)
    options: dict[str, Any] = {"max_tokens": size.num_tokens, "logprobs": 0, **SEEDED}

    def samples_of(prompt: list[int], index: int, of: Server) -> list[Answer]:
        return collect(of.start(request_of(prompt, n=3, seed=1000 * index, **options)))

    def all_samples(of: Server) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            groups = pool.map(lambda i: samples_of(prompts[i], i, of), range(len(prompts)))
            return [answer for group in groups for answer in group]

    expected = all_samples(server)
    with small_pool(size, swap_space=swap_space) as small:
        check_same(all_samples(small), expected)
        assert small.metric("octavo_preemptions_total", kind="swap" if swap_space else "recompute") > 0


# Prefix cache


@pytest.mark.parametrize(
    ("num_prompts", "num_prompt_tokens", "num_tokens"),
    [
        pytest.param(3, 165, 16, id="part"),
        pytest.param(8, 331, 64, id="all", marks=pytest.mark.full),
    ],
)
def test_answers_are_the_same_behind_a_cold_a_hot_and_a_host_cache(
    server: Server, text_ids: list[int], num_prompts: int, num_prompt_tokens: int, num_tokens: int
) -> None:
    """Cold; hot, one at a time and together; then from the host, where other prompts have driven the blocks."""
    size = Size(num_prompts, num_prompt_tokens, num_tokens)
    asks = asks_of(text_ids, size)[:num_prompts]
    asks += [Ask(ask.prompt, {**ask.options, "seed": 5, **SEEDED}) for ask in asks]
    expected = cold_answers(server, asks)
    num_blocks = size.num_prompts * (size.blocks_per_sequence + 1) * 2
    num_cached = (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    with running(num_device_blocks=num_blocks, block_size=BLOCK_SIZE, swap_space=2 * SWAP_SPACE) as cached:
        assert cached_counts(cached, asks, expected, 1) == [0] * num_prompts + [num_cached] * num_prompts
        assert cached_counts(cached, asks, expected, 1) == [num_cached] * len(asks)
        assert cached_counts(cached, asks, expected, len(asks)) == [num_cached] * len(asks)
        assert hits(cached, "host") == 0

        fill_device(cached, num_blocks)
        assert cached_counts(cached, asks, expected, len(asks)) == [num_cached] * len(asks)
        assert hits(cached, "host") >= num_prompts * num_cached
        cached.wait_idle()

        cached.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), timeout=30)
        assert cached_counts(cached, asks[:1], expected[:1], 1) == [0]


def cached_counts(server: Server, asks: Sequence[Ask], expected: Sequence[Answer], concurrency: int) -> list[int]:
    """Checks the answers; returns how many of each prompt's tokens came from the cache, as the usage tells."""
    with ThreadPoolExecutor(concurrency) as pool:
        replies = list(pool.map(lambda ask: server.reply(ask.prompt, **ask.options), asks))
    check_same([reply.answers[0] for reply in replies], expected)
    return [reply.usage.cached_token_count for reply in replies]


def fill_device(server: Server, num_blocks: int) -> None:
    """Sends prompts of nonsense until nothing else can be cached on the device."""
    rng = random.Random(3)
    num_tokens = 10 * BLOCK_SIZE
    for _ in range(num_blocks // 10 + 2):
        server.generate([rng.randrange(300, 10_000) for _ in range(num_tokens)], max_tokens=1)


def hits(server: Server, tier: str) -> float:
    return server.metric("octavo_prefix_cache_hits_total", tier=tier)


def test_requests_that_arrive_together_compute_their_prefix_once(server: Server, text_ids: list[int]) -> None:
    """Eight at once with 320 tokens in common: one computes them, the others wait for its result."""
    common, size = text_ids[100:420], 8
    asks = [Ask([*common, 400 + i, 401 + i], {"max_tokens": 8, "logprobs": 1}) for i in range(size)]
    expected = cold_answers(server, asks)
    together = [Ask(ask.prompt, {**ask.options, "cache_salt": "together"}) for ask in asks]
    counts = cached_counts(server, together, expected, size)
    assert sorted(counts) == [0] + [320] * (size - 1)


# Forks

FORK_LENGTHS = [
    pytest.param((1, 16, 33), id="part"),
    pytest.param((1, 2, 15, 16, 17, 31, 32, 33, 48, 165, 700), id="all", marks=pytest.mark.full),
]


@pytest.mark.parametrize("lengths", FORK_LENGTHS)
def test_four_samples_are_four_requests_with_following_seeds(
    server: Server, text_ids: list[int], lengths: tuple[int, ...]
) -> None:
    """Prompts that end within, at and behind the end of a block, so that samples share it, or copy it at once."""
    options: dict[str, Any] = {"max_tokens": 24, "logprobs": 2, **SEEDED}
    singles = [
        Ask(text_ids[:length], {**options, "seed": 7 * length + i, "cache_salt": f"single {length} {i}"})
        for length in lengths
        for i in range(4)
    ]
    expected = answer_all(server, singles, 8)
    with ThreadPoolExecutor(len(lengths)) as pool:
        groups = list(pool.map(lambda n: samples_of_four(server, text_ids[:n], 7 * n, options), lengths))
    check_same([answer for group in groups for answer in group], expected)
    server.wait_idle()


def samples_of_four(server: Server, prompt: list[int], seed: int, options: dict[str, Any]) -> list[Answer]:
    reply = collect_reply(server.start(request_of(prompt, n=4, seed=seed, **options)))
    assert reply.usage.prompt_token_count == len(prompt)
    assert reply.usage.completion_token_count == sum(len(answer.token_ids) for answer in reply.answers)
    return reply.answers


# Death of the worker


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param(Size(16, 43, 48), {}, id="part"),
        pytest.param(Size(16, 83, 160), {"swap_space": SWAP_SPACE}, id="all", marks=pytest.mark.full),
        pytest.param(
            Size(16, 83, 96),
            {"swap_space": SWAP_SPACE, "num_device_blocks": 100},
            id="all-small-pool",
            marks=pytest.mark.full,
        ),
    ],
)
def test_streams_are_the_same_when_the_worker_is_killed_three_times(
    server: Server, text_ids: list[int], size: Size, settings: dict[str, Any]
) -> None:
    """32 streams, greedy and seeded, half over gRPC and half over HTTP. Nothing is lost, nothing comes twice."""
    asks = asks_of(text_ids, size)
    assert len(asks) == 32
    expected = cold_answers(server, asks)
    with running(**settings) as own:
        streams: list[Stream] = []
        for i, ask in enumerate(asks):
            if i % 2 == 0:
                streams.append(GrpcStream(own, ask.prompt, **ask.options))
            else:
                streams.append(HttpStream(own, ask.prompt, **{**ask.options, "logprobs": 0}))
        kill_worker_during(own, streams, len(asks) * size.num_tokens, 3)
        answers = [stream.finish() for stream in streams]
        check_same(answers[::2], expected[::2])
        for answer, wanted in zip(answers[1::2], expected[1::2], strict=True):
            assert answer.logprobs == wanted.logprobs
            assert answer.text == wanted.text
        assert {stream.num_tokens for stream in streams} == {size.num_tokens}
        own.wait_idle()
        assert own.state().workers[0].lost_session_count == 3
