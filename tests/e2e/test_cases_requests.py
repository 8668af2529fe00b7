"""What other servers' users reported about scheduling, leaving clients, shutdown and leaks, tried on this one.

Each test names the report it stands for (BR-…) and what went wrong there. They go through HTTP, as the reports' authors
did, and most of them to a tiny random model, since the words do not matter.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_router.metrics import FINISH_ABORT
from tests.e2e.completions import BLOCK_SIZE, Caller, random_prompt
from tests.e2e.harness import CALL_TIMEOUT_S, Server, resident_bytes, running, wait_until
from tests.e2e.streams import HttpStream, lines_of, wait_for_tokens

# Tokens of a sequence that its reader has not seen: plans in flight, and tokens on their way.
UNSEEN_TOKENS = 40


@pytest.fixture(scope="module")
def narrow(tiny_model: dict[str, Any]) -> Iterator[Caller]:
    """A tiny model that runs two sequences at a time."""
    with running(**tiny_model, max_num_seqs=2) as own:
        yield Caller(own)


# SCHED: scheduling and chunked prefill


@pytest.mark.full
def test_br024_chunks_of_any_size_give_the_same_tokens(uncached: Caller, english: list[int]) -> None:
    """BR-024: chunked prefill changed the answer to a long prompt."""
    expected = uncached.answer(english[:700], 32)
    chunked = [{"max_num_batched_tokens": size} for size in (16, 33, 64)]
    for settings in [*chunked, {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False}]:
        with running(**settings) as own:
            assert Caller(own).answer(english[:700], 32) == expected, settings


def test_br025_a_request_of_higher_priority_goes_first(narrow: Caller) -> None:
    """BR-025: priority was accepted, but the request waited for those of lower priority."""
    low = [HttpStream(narrow.server, [11] * 10, max_tokens=200, priority=1) for _ in range(4)]
    wait_for_tokens(low, 1)
    HttpStream(narrow.server, [12] * 10, max_tokens=5, priority=0).finish()
    assert sum(stream.num_tokens == 200 for stream in low) <= 2
    for stream in low:
        stream.finish()


def test_br026_neither_large_nor_small_requests_starve(pressed: Caller) -> None:
    """BR-026: one request that could not get its blocks stopped everything, or was overtaken for ever.

    Documented here: strictly first in, first out. The large one begins before any of the small ones behind it.
    """
    server = pressed.server
    holders = [HttpStream(server, [13 + i] * 300, max_tokens=180) for i in range(4)]
    for stream in holders:
        stream.wait_begun()
    large = HttpStream(server, [24] * 490, max_tokens=20)
    wait_until(lambda: server.state().queue.request_count == 5, 30, lambda: "the large request did not arrive")
    small = [HttpStream(server, [25] * 10, max_tokens=5) for _ in range(6)]
    wait_until(lambda: small_or_large(small, large) != "", 60, lambda: "nobody began")
    assert small_or_large(small, large) == "large"
    for stream in (*holders, large, *small):
        stream.finish()
    server.wait_idle()


def small_or_large(small: Sequence[HttpStream], large: HttpStream) -> str:
    """Who has begun; the large request wherever it has a token too."""
    return "large" if large.num_tokens else "small" if any(stream.num_tokens for stream in small) else ""


# CANCEL: clients that leave


def test_br021_admission_survives_twenty_rounds_of_leavers(narrow: Caller) -> None:
    """BR-021: after a stall nothing was admitted any more although the pool was empty."""
    server = narrow.server
    for _ in range(20):
        streams = [HttpStream(server, [9] * 20, max_tokens=400) for _ in range(6)]
        wait_for_tokens(streams, 4)
        for stream in streams:
            stream.leave()
        for stream in streams:
            stream.finish()
    narrow.complete([9] * 20, 5)
    server.wait_idle()
    assert server.metric("octavo_sequences_waiting") == 0
    assert server.metric("octavo_sequences_running") == 0


def test_br090_every_leaver_is_counted_and_nobody_else(tiny: Caller) -> None:
    """BR-090: an abort was sent for every normal end, or never. BR-102, BR-103: gauges and counters behind aborts."""
    server = tiny.server
    before = server.metric("octavo_requests_finished_total", reason=FINISH_ABORT)
    whole = [HttpStream(server, [21, 22, i + 23], max_tokens=10) for i in range(20)]
    for stream in whole:
        stream.finish()
    broken = [HttpStream(server, [21, 22, i + 23], max_tokens=400) for i in range(20)]
    for stream in broken:
        stream.wait_begun()
        stream.leave()
    for stream in broken:
        stream.finish()
    server.wait_idle()
    assert server.metric("octavo_requests_finished_total", reason=FINISH_ABORT) == before + 20
    for gauge in ("sequences_waiting", "sequences_running", "requests_unfinished", "kv_usage_ratio"):
        assert server.metric(f"octavo_{gauge}") == 0
    assert server.metric("octavo_requests_accepted_total") == server.metric("octavo_requests_finished_total")


def test_br091_an_abandoned_answer_does_not_come_back(caller: Caller, uncached: Caller, english: list[int]) -> None:
    """BR-091: the output of a request that was left came up in a later one."""
    left = HttpStream(caller.server, english[:90], max_tokens=400, cache_salt="br091")
    left.wait_begun()
    left.leave()
    left.finish()
    question = english[:90] + english[500:520]
    assert caller.answer(question, 24, cache_salt="br091") == uncached.answer(question, 24)


def test_br092_leaving_at_the_last_token_harms_nobody(tiny: Caller) -> None:
    """BR-092: an abort for a request that had just ended killed the back end."""
    url = f"{tiny.server.http_url}/v1/completions"
    for attempt in range(200):
        body = {"prompt": [31, 32], "max_tokens": 1 + attempt % 3, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url, json=body, timeout=CALL_TIMEOUT_S) as response:
            events = (line for line in lines_of(response.iter_bytes()) if line.startswith(b"data: "))
            for number, event in enumerate(events):
                if event == b"data: [DONE]" or number == attempt % 5:
                    break
    tiny.server.wait_idle()
    tiny.complete([31, 32], 3)
    errors = [line for line in tiny.server.log if "Traceback" in line or "ERROR" in line]
    assert not errors, errors


# LIFECYCLE: crashes, shutdown, leaks


def test_br100_sigterm_tells_everybody(tiny_model: dict[str, Any]) -> None:
    """BR-100: after SIGTERM clients never heard that their request was dropped, and the process hung."""
    with running(**tiny_model, max_num_seqs=2, grace_period_s=60) as own:
        streams = [HttpStream(own, [41] * 10, max_tokens=300) for _ in range(6)]
        wait_until(lambda: own.state().queue.request_count == 6, 30, lambda: "not every request arrived")
        pids = own.pair.pids()
        own.pair.begin_stop()
        wait_until(lambda: refuses(own), 20, lambda: "new requests are still taken")
        for stream in streams:
            assert stream.finish().finish_reason == "length"
        own.pair.stop()
        assert own.pair.error is None
        assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]


def refuses(server: Server) -> bool:
    try:
        return Caller(server).post([42], 1).status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_br101_memory_does_not_grow_with_requests(tiny_model: dict[str, Any]) -> None:
    """BR-101: host memory grew with the number of requests. Below 5 MB per 1,000 here, behind a warm-up of 1,000."""
    rng = random.Random(101)
    with running(**tiny_model, num_device_blocks=200, swap_space=0.0) as own:
        small = Caller(own)
        resident: list[dict[str, int]] = []
        for number in range(6000):
            small.complete(random_prompt(rng, rng.randrange(1, 60)), 1)
            if number >= 1000 and number % 500 == 0:
                resident.append({name: resident_bytes(pid) for name, pid in own.pair.pids().items()})
        for name, first in resident[0].items():
            assert resident[-1][name] - first < 5 * 5_000_000, f"{name}: {[at[name] for at in resident]}"


def test_br104_usage_counts_what_sequences_hold(pressed: Caller) -> None:
    """BR-104: the usage metric was wrong. 160 tokens of a pool of 100 blocks are 10 or 11 blocks; idle is 0."""
    server = pressed.server
    stream = HttpStream(server, [51] * 150, max_tokens=200)
    wait_for_tokens([stream], 10)
    before = 150 + stream.num_tokens
    usage = server.metric("octavo_kv_usage_ratio")
    after = 150 + stream.num_tokens + UNSEEN_TOKENS
    assert before / 1600 <= usage <= (after + BLOCK_SIZE) / 1600
    stream.finish()
    server.wait_idle()
    assert server.metric("octavo_kv_usage_ratio") == 0
