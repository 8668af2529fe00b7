"""A server whose K and V are of 8 bits: answers are the same bit for bit whatever runs beside them, in a pool that is
too small for all, and behind the cache; and blocks take less memory than those of the model's own dtype.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.v1 import admin_pb2
from tests.e2e.harness import Server, running
from tests.e2e.test_kv_memory import SWAP_SPACE, Ask, Size, answer_all, cached_counts, check_same, cold_answers

SIZE = Size(num_prompts=4, num_prompt_tokens=75, num_tokens=40)
KV_INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def roomy(tiny_model: dict[str, Any]) -> Iterator[Server]:
    """A tiny model with room for everything."""
    with running(**tiny_model, **KV_INT8) as own:
        yield own


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    """Every prompt greedily and with a seed."""
    rng = random.Random(8)
    prompts = [rng.choices(range(3, 384), k=SIZE.num_prompt_tokens) for _ in range(SIZE.num_prompts)]
    common: dict[str, Any] = {"max_tokens": SIZE.num_tokens, "logprobs": 2, "ignore_eos": True}
    greedy = [Ask(prompt, common) for prompt in prompts]
    return greedy + [Ask(prompt, {**common, "seed": i, "temperature": 0.9}) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param({"swap_space": 0.0, "enable_prefix_caching": False}, "recompute", id="recompute"),
        pytest.param({"swap_space": SWAP_SPACE}, "swap", id="swap"),
    ],
)
def test_answers_are_the_same_alone_and_under_pressure(
    roomy: Server, tiny_model: dict[str, Any], asks: list[Ask], settings: dict[str, Any], kind: str
) -> None:
    alone = [roomy.generate(ask.prompt, **ask.options, cache_salt=f"alone {i}") for i, ask in enumerate(asks)]
    check_same(cold_answers(roomy, asks), alone)
    with running(**tiny_model, **KV_INT8, num_device_blocks=SIZE.small_pool, **settings) as small:
        check_same(answer_all(small, asks, len(asks)), alone)
        assert small.metric("octavo_preemptions_total", kind=kind) > 0
        small.wait_idle()


def test_answers_are_the_same_behind_the_cache(roomy: Server, asks: list[Ask]) -> None:
    first, count = asks[: SIZE.num_prompts], SIZE.num_prompts
    expected = cold_answers(roomy, first)
    roomy.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), timeout=30)
    num_cached = (SIZE.num_prompt_tokens - 1) // 16 * 16
    assert cached_counts(roomy, first, expected, 1) == [0] * count
    assert cached_counts(roomy, first, expected, count) == [num_cached] * count


def test_samples_of_a_group_are_those_of_single_requests(roomy: Server, asks: list[Ask]) -> None:
    """Forks share blocks and their scales until they write into them."""
    prompt = asks[0].prompt
    options: dict[str, Any] = {"max_tokens": 12, "logprobs": 0, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        group, again = pool.map(lambda _: roomy.reply(prompt, n=3, **options).answers, range(2))
    check_same(again, group)
    assert len({tuple(answer.token_ids) for answer in group}) > 1


def test_blocks_take_less_memory(roomy: Server, tiny_model: dict[str, Any]) -> None:
    memory = {**tiny_model, "num_device_blocks": 0, "kv_cache_memory": 0.01, "swap_space": 0.0}
    with running(**memory) as wide, running(**memory, **KV_INT8) as narrow:
        blocks = [own.metric("octavo_kv_blocks_total", tier="device") for own in (wide, narrow)]
    # fp32 takes 4 bytes an element, 8 bits one and a scale of 4 for every 16.
    assert blocks[1] / blocks[0] == pytest.approx(64 / 20, rel=0.01)
