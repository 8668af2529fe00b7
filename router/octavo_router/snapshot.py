"""The present state as people look at it: AdminService's messages and the gauges, read from the scheduler. Changes
nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.config import RouterConfig
from octavo.v1 import admin_pb2
from octavo.worker.v1 import worker_pb2
from octavo_router.block_pool import BlockPool
from octavo_router.metrics import Gauges, Metrics
from octavo_router.scheduler import Scheduler


def queue_state(scheduler: Scheduler, config: RouterConfig) -> admin_pb2.QueueState:
    """What waits and what runs."""
    return admin_pb2.QueueState(
        waiting_sequence_count=scheduler.num_waiting,
        running_sequence_count=len(scheduler.running),
        preempted_sequence_count=scheduler.waiting.num_preempted,
        request_count=scheduler.num_requests,
        waiting_prompt_token_count=scheduler.num_waiting_prompt_tokens,
        max_waiting_request_count=config.max_waiting_requests,
        max_waiting_prompt_token_count=config.max_waiting_prompt_tokens,
    )


def worker_state(
    scheduler: Scheduler,
    description: worker_pb2.DescribeResponse,
    *,
    address: str,
    model_name: str,
    is_connected: bool,
    num_lost_sessions: int,
) -> admin_pb2.WorkerState:
    """The worker, its session and its memory."""
    blocks = scheduler.blocks
    return admin_pb2.WorkerState(
        name=description.worker_name,
        address=address,
        status=admin_pb2.WORKER_STATUS_READY if is_connected else admin_pb2.WORKER_STATUS_CONNECTING,
        epoch=scheduler.epoch or 0,
        incarnation=description.incarnation,
        step_seq=scheduler.last_step_seq,
        lost_session_count=num_lost_sessions,
        device_pool=_pool_state(
            blocks.device,
            blocks.block_size,
            ((sequence.block_table, sequence.num_planned) for sequence in scheduler.running),
        ),
        host_pool=_pool_state(
            blocks.host,
            blocks.block_size,
            ((sequence.host_table, sequence.num_planned) for sequence in scheduler.waiting),
        ),
        model=model_name,
        model_digest=description.model.digest,
        dtype=description.model.dtype,
        backend=description.backend,
    )


def totals(scheduler: Scheduler, metrics: Metrics) -> admin_pb2.Totals:
    """What was done since the router started."""
    counts = scheduler.counts
    return admin_pb2.Totals(
        accepted_request_count=metrics.num_accepted,
        prompt_token_count=metrics.num_prompt_tokens,
        completion_token_count=metrics.num_generation_tokens,
        prefix_query_token_count=counts.num_prefix_query_tokens,
        prefix_hit_token_count=counts.num_prefix_hit_tokens,
        preemption_count=counts.num_preemptions,
    )


def _pool_state(pool: BlockPool, block_size: int, holders: Iterable[tuple[Sequence[int], int]]) -> admin_pb2.PoolState:
    """holders: block tables, and how many tokens each holds."""
    return admin_pb2.PoolState(
        block_count=pool.num_blocks,
        used_block_count=pool.num_used,
        cached_block_count=pool.num_cached,
        block_size=block_size,
        held_token_count=_num_held_tokens(block_size, holders),
    )


def _num_held_tokens(block_size: int, holders: Iterable[tuple[Sequence[int], int]]) -> int:
    """Of two tables that share a block, the one that fills it further counts."""
    filled: dict[int, int] = {}
    for table, num_tokens in holders:
        for index, block_id in enumerate(table):
            filled[block_id] = max(filled.get(block_id, 0), min(block_size, num_tokens - index * block_size))
    return sum(filled.values())


def gauges(scheduler: Scheduler, *, is_connected: bool) -> Gauges:
    """What the metrics show."""
    device, host = scheduler.blocks.device, scheduler.blocks.host
    return Gauges(
        num_waiting=scheduler.num_waiting,
        num_running=len(scheduler.running),
        num_preempted=scheduler.waiting.num_preempted,
        num_requests=scheduler.num_requests,
        num_waiting_prompt_tokens=scheduler.num_waiting_prompt_tokens,
        num_blocks=device.num_blocks,
        num_used_blocks=device.num_used,
        num_cached_blocks=device.num_cached,
        num_host_blocks=host.num_blocks,
        num_used_host_blocks=host.num_used,
        num_cached_host_blocks=host.num_cached,
        is_connected=is_connected,
        counts=scheduler.counts,
    )
