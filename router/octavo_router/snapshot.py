"""The present state as people look at it: AdminService's messages and the gauges, read from the scheduler. Changes
nothing."""

from __future__ import annotations

from octavo.config import RouterConfig
from octavo.v1 import admin_pb2
from octavo.worker.v1 import worker_pb2
from octavo_router.metrics import Gauges
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
    device, block_size = scheduler.blocks.device, scheduler.blocks.block_size
    return admin_pb2.WorkerState(
        name=description.worker_name,
        address=address,
        status=admin_pb2.WORKER_STATUS_READY if is_connected else admin_pb2.WORKER_STATUS_CONNECTING,
        epoch=scheduler.epoch or 0,
        incarnation=description.incarnation,
        step_seq=scheduler.last_step_seq,
        lost_session_count=num_lost_sessions,
        device_pool=admin_pb2.PoolState(
            block_count=device.num_blocks, used_block_count=device.num_used, block_size=block_size
        ),
        host_pool=admin_pb2.PoolState(block_count=description.kv_memory.host_block_count, block_size=block_size),
        model=model_name,
        model_digest=description.model.digest,
        dtype=description.model.dtype,
        backend=description.backend,
    )


def gauges(scheduler: Scheduler, *, is_connected: bool) -> Gauges:
    """What the metrics show."""
    device = scheduler.blocks.device
    return Gauges(
        num_waiting=scheduler.num_waiting,
        num_running=len(scheduler.running),
        num_preempted=scheduler.waiting.num_preempted,
        num_requests=scheduler.num_requests,
        num_waiting_prompt_tokens=scheduler.num_waiting_prompt_tokens,
        num_used_blocks=device.num_used,
        num_blocks=device.num_blocks,
        is_connected=is_connected,
        num_preemptions=scheduler.num_preemptions,
    )
