"""How long the pure scheduler takes for a plan while others wait: one measurement, in a process of its own.

    python benchmarks/plan_times.py --waiting 100000

The batch is full and stays so: requests end all the time, each is followed by one of those that wait, and a new one
comes in its place. Garbage is collected as in the router. Prints one line of JSON: the times in microseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque

from octavo.garbage import spare_long_lived
from octavo_router.limits import Limits
from octavo_router.plan import StepPlan, StepResult
from octavo_router.request import Output, Request, Sampling, Stopping
from octavo_router.results import TokenSampled
from octavo_router.scheduler import Scheduler

PROMPT_TOKENS = 64
MAX_TOKENS = 128
WARM_UP_PLANS = 300


def make_request(rng: random.Random, number: int) -> Request:
    """A request that ends somewhere between its first token and the last that it may have."""
    return Request(
        request_id=str(number),
        prompt_token_ids=[rng.randrange(1000) for _ in range(PROMPT_TOKENS)],
        sampling=Sampling(),
        stopping=Stopping(max_tokens=rng.randrange(1, MAX_TOKENS), ignore_eos=True),
        output=Output(),
        tenant=str(number % 10),
    )


def answer(plan: StepPlan) -> StepResult:
    """The result of a worker that samples the same token for everybody."""
    sampled = [sequence_id for sequence_id, samples in zip(plan.sequence_ids, plan.samples, strict=True) if samples]
    return StepResult(plan.epoch, plan.step_seq, sequence_ids=sampled, token_ids=[7] * len(sampled))


def plan_times_us(num_waiting: int, *, batch: int, num_plans: int) -> list[float]:
    """Times of that many plans at a full batch, in the order they were made."""
    limits = Limits(
        block_size=16,
        num_device_blocks=batch * (PROMPT_TOKENS + MAX_TOKENS) // 8,
        max_model_len=8192,
        max_num_seqs=batch,
        max_num_batched_tokens=512,
        max_plans_in_flight=2,
    )
    spare_long_lived()
    rng = random.Random(0)
    scheduler = Scheduler(limits, eos_token_ids=frozenset())
    scheduler.begin_session(1, limits)
    for number in range(num_waiting + batch):
        scheduler.add(make_request(rng, number), now=0.0)
    in_flight: deque[StepPlan] = deque()
    times: list[float] = []
    while len(times) < WARM_UP_PLANS + num_plans:
        began = time.perf_counter()
        plan = scheduler.plan(float(len(times)))
        times.append(1e6 * (time.perf_counter() - began))
        assert plan is not None, "there is always something to plan"
        in_flight.append(plan)
        if len(in_flight) == limits.max_plans_in_flight:
            for event in scheduler.apply(answer(in_flight.popleft())):
                if isinstance(event, TokenSampled) and event.finish_reason is not None:
                    number += 1
                    scheduler.add(make_request(rng, number), now=float(len(times)))
    return times[WARM_UP_PLANS:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait")
    parser.add_argument("--batch", type=int, default=64, help="sequences that run")
    parser.add_argument("--plans", type=int, default=3000, help="plans to time")
    args = parser.parse_args()
    print(json.dumps(plan_times_us(args.waiting, batch=args.batch, num_plans=args.plans)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
