"""What an engine is doing, in one line: how many sequences run and wait, how full its memory is, how fast it is.

Rates are made of two readings of `AdminService.GetState`; where a reading comes from is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from octavo.v1 import admin_pb2


@dataclass(frozen=True)
class EngineStats:
    """A state, and what was done between an earlier one and it.

    kv_usage: share of the device's KV blocks that sequences hold, over all workers; cached prefixes do not count.
    prefix_hit_rate: share of the prompt tokens looked up since then that were in the prefix cache; None where none
    were. Throughputs are in tokens per second since then.
    """

    num_running: int
    num_waiting: int
    num_preempted: int
    kv_usage: float
    prefix_hit_rate: float | None
    prompt_throughput: float
    generation_throughput: float

    @classmethod
    def between(cls, earlier: admin_pb2.GetStateResponse, state: admin_pb2.GetStateResponse) -> Self:
        """The statistics at `state`. An earlier reading of another router, or none, is its start."""
        if earlier.uptime_ms > state.uptime_ms:
            earlier = admin_pb2.GetStateResponse()
        before, now = earlier.totals, state.totals
        seconds = max(state.uptime_ms - earlier.uptime_ms, 1) / 1000
        num_queries = now.prefix_query_token_count - before.prefix_query_token_count
        num_hits = now.prefix_hit_token_count - before.prefix_hit_token_count
        num_blocks = sum(worker.device_pool.block_count for worker in state.workers)
        num_used = sum(worker.device_pool.used_block_count for worker in state.workers)
        return cls(
            num_running=state.queue.running_sequence_count,
            num_waiting=state.queue.waiting_sequence_count,
            num_preempted=state.queue.preempted_sequence_count,
            kv_usage=num_used / num_blocks if num_blocks else 0.0,
            prefix_hit_rate=num_hits / num_queries if num_queries else None,
            prompt_throughput=(now.prompt_token_count - before.prompt_token_count) / seconds,
            generation_throughput=(now.completion_token_count - before.completion_token_count) / seconds,
        )

    def __str__(self) -> str:
        """One line, in the order that vLLM's log has."""
        hit_rate = "-" if self.prefix_hit_rate is None else f"{self.prefix_hit_rate:.1%}"
        return (
            f"Avg prompt throughput: {self.prompt_throughput:.1f} tokens/s, "
            f"Avg generation throughput: {self.generation_throughput:.1f} tokens/s, "
            f"Running: {self.num_running} seqs, Waiting: {self.num_waiting} seqs, "
            f"Preempted: {self.num_preempted} seqs, KV cache usage: {self.kv_usage:.1%}, "
            f"Prefix cache hit rate: {hit_rate}"
        )


class StatLogger:
    """Reads an engine's statistics; rates are those since its last reading, at first since the engine's start."""

    def __init__(self, read: Callable[[], admin_pb2.GetStateResponse]) -> None:
        self._read = read
        self._last = admin_pb2.GetStateResponse()

    def stats(self) -> EngineStats:
        """The statistics now."""
        state = self._read()
        stats = EngineStats.between(self._last, state)
        self._last = state
        return stats

    def print_stats(self) -> None:
        """Prints the statistics to stdout, in one line."""
        print(self.stats(), flush=True)
