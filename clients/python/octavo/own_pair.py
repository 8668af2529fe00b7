"""The worker and the router that one Python program has to itself, for `LLM` and `AsyncLLMEngine`.

Starts them, waits until they serve, and draws the seeds of requests that have none. How the two programs are kept
alive is `process`'s; talking to them is the clients'.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

from octavo.config import RouterConfig
from octavo.engine_args import EngineArgs
from octavo.errors import OctavoError
from octavo.process import ProcessPair
from octavo.types import SamplingParams

_SEED_MASK = (1 << 64) - 1


def started_pair(args: EngineArgs, *, on_end: Callable[[OctavoError | None], None] = lambda error: None) -> ProcessPair:
    """A pair that serves on a Unix socket. on_end as `ProcessPair`'s.

    Stops what was started if it cannot serve, or if the caller interrupts the wait. Raises StartError.
    """
    pair = ProcessPair(args.worker_config, args.router_config, on_log=_show, on_end=on_end)
    try:
        pair.wait_ready()
    except BaseException:
        pair.stop(at_once=True)
        raise
    return pair


def concurrency_of(router: RouterConfig) -> int:
    """Requests to keep under way: enough to fill the batch and to have the next ones queued, below the queue's
    limit.
    """
    wanted = 2 * router.max_num_seqs
    return min(wanted, router.max_waiting_requests) if router.max_waiting_requests else wanted


class RequestSeeds:
    """Gives each request a seed of its own, derived from one seed and from how many requests came before. None: the
    router draws them.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._num_requests = 0

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """params, with the next seed where they have none."""
        if self._seed is None:
            return params
        seed = derived_seed(self._seed, self._num_requests)
        self._num_requests += 1  # counted for every request, so that one with its own seed shifts no other's
        return params if params.seed is not None else dataclasses.replace(params, seed=seed)


def derived_seed(seed: int, position: int) -> int:
    """The seed of the request at `position`: SplitMix64's output function (Steele et al. 2014) over seed and position.

    Neighbouring requests must not get neighbouring seeds: sample i of a request draws from its seed + i.
    """
    value = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _SEED_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
    return value ^ (value >> 31)


def _show(name: str, line: str) -> None:
    print(f"{name} | {line}", file=sys.stderr, flush=True)
