from __future__ import annotations

import pytest

from octavo.stats import EngineStats, StatLogger
from octavo.v1 import admin_pb2


def state(uptime_ms: int, prompt: int, completion: int, queries: int, hits: int) -> admin_pb2.GetStateResponse:
    pool = admin_pb2.PoolState(block_count=200, used_block_count=30, cached_block_count=50, block_size=16)
    return admin_pb2.GetStateResponse(
        uptime_ms=uptime_ms,
        queue=admin_pb2.QueueState(running_sequence_count=3, waiting_sequence_count=2, preempted_sequence_count=1),
        workers=[admin_pb2.WorkerState(device_pool=pool)],
        totals=admin_pb2.Totals(
            prompt_token_count=prompt,
            completion_token_count=completion,
            prefix_query_token_count=queries,
            prefix_hit_token_count=hits,
        ),
    )


FIRST = state(10_000, prompt=1000, completion=500, queries=1000, hits=250)
SECOND = state(14_000, prompt=1200, completion=900, queries=1200, hits=400)


def test_rates_are_those_since_the_last_reading(capsys: pytest.CaptureFixture[str]) -> None:
    states = iter([FIRST, SECOND, SECOND])
    logger = StatLogger(lambda: next(states))
    for _ in range(3):
        logger.print_stats()
    assert capsys.readouterr().out.splitlines() == [
        "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 50.0 tokens/s, Running: 3 seqs, "
        "Waiting: 2 seqs, Preempted: 1 seqs, KV cache usage: 15.0%, Prefix cache hit rate: 25.0%",
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 100.0 tokens/s, Running: 3 seqs, "
        "Waiting: 2 seqs, Preempted: 1 seqs, KV cache usage: 15.0%, Prefix cache hit rate: 75.0%",
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 3 seqs, "
        "Waiting: 2 seqs, Preempted: 1 seqs, KV cache usage: 15.0%, Prefix cache hit rate: -",
    ]


def test_a_router_that_was_started_again_counts_from_its_start() -> None:
    stats = EngineStats.between(SECOND, state(2_000, prompt=40, completion=20, queries=40, hits=0))
    assert (stats.prompt_throughput, stats.generation_throughput, stats.prefix_hit_rate) == (20.0, 10.0, 0.0)


def test_no_worker_is_no_memory() -> None:
    stats = EngineStats.between(admin_pb2.GetStateResponse(), admin_pb2.GetStateResponse())
    assert stats == EngineStats(0, 0, 0, 0.0, None, 0.0, 0.0)
