"""Requests served by a router's scheduler and a worker's executor, in one process: what the two programs do, without
the network between them and without text. Prompts are computed, in chunks beside decodes."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from gpu.bench import Bench
from gpu.model import Served
from octavo.worker.v1 import worker_pb2 as pb
from octavo_router.limits import Limits
from octavo_router.plan import StepPlan
from octavo_router.request import Request, Sampling, Stopping
from octavo_router.results import TokenSampled
from octavo_router.scheduler import Scheduler
from octavo_router.worker_messages import plan_message, result_columns
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.step_pipeline import StepPipeline

_TIMEOUT_S = 60.0
_EPOCH = 1


@dataclass(frozen=True)
class Load:
    """What was served. seconds: from the first request's arrival to the last token; first_s: to the first token of
    each request, the mean."""

    num_tokens: int
    seconds: float
    first_s: float
    num_steps: int


def prompts(bench: Bench, seed: int) -> list[list[int]]:
    """Random ones, of one length."""
    generator, sizes = np.random.default_rng(seed), bench.sizes
    shape = (sizes.requests, sizes.prompt)
    drawn: list[list[int]] = generator.integers(0, sizes.model.vocab_size, shape).tolist()
    return drawn


def serve_load(bench: Bench, served: Served, seed: int) -> Load:
    """Greedy requests that all arrive at once, `output` tokens each."""
    router = Scheduler(_limits(bench, served), eos_token_ids=frozenset())
    router.begin_session(_EPOCH, _limits(bench, served))
    thread = ExecutorThread()
    pipeline = StepPipeline(thread)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts(bench, seed)):
        stopping = Stopping(max_tokens=bench.sizes.output, ignore_eos=True)
        router.add(Request(str(number), prompt, Sampling(temperature=0.0), stopping), now=0.0)
    under_way: deque[tuple[StepPlan, Future[pb.StepResult]]] = deque()
    firsts: dict[int, float] = {}
    num_tokens = num_steps = 0
    try:
        while True:
            while (plan := router.plan(time.perf_counter() - started)) is not None:
                message = plan_message(plan)
                begin = pipeline.submit(lambda message=message: served.executor.begin(message), lambda: None)  # type: ignore[misc]
                under_way.append((plan, begin))
                num_steps += 1
            if not under_way:
                break
            plan, answer = under_way.popleft()
            response = pb.RunResponse(epoch=_EPOCH, step_seq=plan.step_seq, result=answer.result(_TIMEOUT_S))
            for event in router.apply(result_columns(response)):
                assert isinstance(event, TokenSampled), event
                num_tokens += 1
                firsts.setdefault(event.sequence.sequence_id, time.perf_counter() - started)
                last = time.perf_counter() - started
    finally:  # for the next load
        thread.submit(served.executor.reset).result(_TIMEOUT_S)
        thread.stop(_TIMEOUT_S)
    assert num_tokens == bench.sizes.requests * bench.sizes.output, num_tokens
    return Load(num_tokens, last, sum(firsts.values()) / len(firsts), num_steps)


def _limits(bench: Bench, served: Served) -> Limits:
    return Limits(
        block_size=bench.sizes.block_size,
        num_device_blocks=served.pool.size.num_device_blocks,
        max_model_len=bench.sizes.model.max_model_len,
        max_num_seqs=max(bench.sizes.requests, max(bench.sizes.batches)),
        max_num_batched_tokens=served.max_batched_tokens,
        max_plans_in_flight=2,
    )
