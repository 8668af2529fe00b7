"""What operators are told about the KV pool."""

from __future__ import annotations

from octavo.v1 import admin_pb2
from octavo.worker.v1 import worker_pb2
from octavo_router.snapshot import worker_state
from tests.router.harness import Harness, make_limits, make_request


def _state(harness: Harness) -> admin_pb2.WorkerState:
    return worker_state(
        harness.scheduler,
        worker_pb2.DescribeResponse(),
        address="127.0.0.1:1",
        model_name="model",
        is_connected=True,
        num_lost_sessions=0,
    )


def test_tokens_in_shared_blocks_count_once() -> None:
    harness = Harness(make_limits(block_size=4))
    harness.add(make_request(num_prompt=6, max_tokens=8, n=2))
    while len(harness.scheduler.running) < 2:
        harness.step()
    first, second = harness.scheduler.running
    assert first.block_table[0] == second.block_table[0]
    pool = _state(harness).device_pool
    assert pool.used_block_count == harness.num_used
    assert pool.held_token_count == 4 + (first.num_planned - 4) + (second.num_planned - 4)
    harness.run()
    pool = _state(harness).device_pool
    assert (pool.used_block_count, pool.held_token_count) == (0, 0)


def test_swapped_out_tokens_are_the_hosts() -> None:
    harness = Harness(make_limits(num_blocks=4, num_host_blocks=4, swaps=True))
    harness.add(make_request("A", num_prompt=6, max_tokens=7))
    harness.add(make_request("B", num_prompt=4, max_tokens=6))
    while not harness.scheduler.counts.num_swap_preemptions:
        assert harness.step()
    (swapped,) = (sequence for sequence in harness.scheduler.waiting if sequence.host_table)
    state = _state(harness)
    assert state.host_pool.held_token_count == swapped.num_planned
    assert state.device_pool.held_token_count == sum(sequence.num_planned for sequence in harness.scheduler.running)
