"""Two hundred rounds of load in which every fifth client leaves in mid-stream: nothing is left behind.

After each round the server must hold no block, no sequence and no request; in the end every block that is not cached
must be free, and no stream open. The resident memory of both programs must stay flat: over the last hundred rounds it
grows by less than 50 KB a round. The pool is small, so that preemption, swapping, eviction and demotion happen all the
time, and it is touched beforehand, for memory that is used for the first time is not a leak.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.v1 import admin_pb2, sampling_pb2
from tests.e2e.harness import Server, resident_bytes, running
from tests.e2e.streams import GrpcStream, HttpStream, Stream

NUM_ROUNDS = 200
NUM_CLIENTS = 20
NUM_LEAVERS = 4
NUM_BLOCKS = 50
BLOCK_SIZE = 16
MAX_SLOPE_BYTES = 50_000
LONGEST_PROMPT = 120
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_k": 50}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc"),
]


@pytest.fixture(params=["llama-linear-bias", "default"])
def soaked(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Iterator[Server]:
    model = {} if request.param == "default" else {"model": str(tiny_models[request.param]), "max_model_len": 512}
    swap_space = 0.1 if request.param == "default" else 0.002
    with running(**model, num_device_blocks=NUM_BLOCKS, swap_space=swap_space) as server:
        yield server


def test_nothing_is_left_behind(soaked: Server) -> None:
    touch_pool(soaked)
    rng = random.Random(200)
    resident: list[dict[str, int]] = []
    for number in range(NUM_ROUNDS):
        run_round(soaked, rng)
        check_empty(soaked, number)
        resident.append({name: resident_bytes(pid) for name, pid in soaked.pair.pids().items()})
    assert soaked.metric("octavo_preemptions_total") > 0
    assert soaked.metric("octavo_prefix_cache_evictions_total") > 0
    assert soaked.state().workers[0].lost_session_count == 0
    check_all_free(soaked)
    assert soaked.admin.Drain(admin_pb2.DrainRequest(), timeout=30).request_count == 0, "streams are left behind"
    for name in ("router", "worker"):
        sizes = [at[name] for at in resident]
        slope = slope_of(sizes[NUM_ROUNDS // 2 :])
        assert slope < MAX_SLOPE_BYTES, f"the {name} grows by {slope:.0f} bytes a round; every tenth: {sizes[::10]}"


def touch_pool(server: Server) -> None:
    """Uses every block of both tiers: prompts of which none is like another fill the device, then the host."""
    rng = random.Random(0)
    num_blocks = sum(pool.block_count for pool in pools(server))
    for _ in range(2 * num_blocks // 10):
        server.generate([rng.randrange(3, 384) for _ in range(160)], max_tokens=1)
    for pool in pools(server):
        assert pool.cached_block_count > 0.9 * pool.block_count


def run_round(server: Server, rng: random.Random) -> None:
    """Twenty clients at once, of whom four leave as soon as they have a token."""
    streams = [start_stream(server, rng, number) for number in range(NUM_CLIENTS)]
    leavers = rng.sample(range(NUM_CLIENTS), NUM_LEAVERS)
    for number in leavers:
        streams[number].wait_begun()
        streams[number].leave()
    for number, stream in enumerate(streams):
        stream.join(120)
        assert not stream.is_alive(), f"client {number} hangs: {server.state()}"
        if number not in leavers:
            assert stream.error is None, f"client {number} failed: {stream.error}"
            assert stream.answer.finish_reason == "length"


def start_stream(server: Server, rng: random.Random, number: int) -> Stream:
    """A request of a kind that its number tells: gRPC or HTTP, greedy or seeded, samples, beams, a common beginning."""
    prompt = rng.choices(range(3, 384), k=rng.randrange(1, LONGEST_PROMPT))
    if number % 3 == 0:
        prompt = [*range(50, 98), *prompt[:40]]
    num_tokens = rng.randrange(1, 80)
    if number == 1:
        beams = sampling_pb2.BeamSearch(beam_width=3)
        return GrpcStream(server, prompt, max_tokens=num_tokens, beam_search=beams)
    if number == 2:
        return GrpcStream(server, prompt, max_tokens=num_tokens, n=4, seed=rng.randrange(1000), **SEEDED)
    if number % 2 == 0:
        return GrpcStream(server, prompt, max_tokens=num_tokens, logprobs=2)
    return HttpStream(server, prompt, max_tokens=num_tokens, seed=rng.randrange(1000), **SEEDED)


def check_empty(server: Server, round_number: int) -> None:
    """No block held and nothing alive."""
    server.wait_idle()
    queue = server.state().queue
    left = (queue.waiting_sequence_count, queue.running_sequence_count, queue.preempted_sequence_count)
    assert left == (0, 0, 0), f"sequences are left behind after round {round_number}: {queue}"
    assert queue.waiting_prompt_token_count == 0
    for pool in pools(server):
        assert pool.used_block_count == 0
        assert pool.cached_block_count <= pool.block_count


def check_all_free(server: Server) -> None:
    """Blocks that are not cached are free: with the caches flushed, one request gets every block of the device (as far
    as the model's length reaches).
    """
    cached = sum(pool.cached_block_count for pool in pools(server))
    flushed = server.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), timeout=30)
    assert flushed.block_count == cached > 0
    assert [pool.cached_block_count for pool in pools(server)] == [0, 0]
    num_tokens = min(NUM_BLOCKS * BLOCK_SIZE, server.settings.get("max_model_len", NUM_BLOCKS * BLOCK_SIZE))
    server.generate([5] * (num_tokens - 1), max_tokens=1)
    server.wait_idle()


def pools(server: Server) -> list[admin_pb2.PoolState]:
    """Device and host."""
    (worker,) = server.state().workers
    return [worker.device_pool, worker.host_pool]


def slope_of(values: Sequence[float]) -> float:
    """The slope of the line through values that stand one apart, by least squares."""
    mean_x, mean_y = (len(values) - 1) / 2, sum(values) / len(values)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values))
    return covariance / sum((x - mean_x) ** 2 for x in range(len(values)))
