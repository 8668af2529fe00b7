"""Everything about one simulated run, drawn from its seed: the pool, the batch, the traffic and what goes wrong.

Draws numbers and nothing else. Requests are drawn by `traffic.py`, with the settings here; `world.py` lets them happen.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, fields

from octavo_router.limits import Limits
from tests.simulator.trace import mean_context_tokens, mean_generated_tokens

STEPS = 500
"""Answered steps behind which no more requests arrive."""

LONGEST_SEQUENCE = 320
"""Tokens. Longer ones would show nothing new and take long."""


TIGHT_POOL, ROOMY_POOL = LONGEST_SEQUENCE // 5, 4 * LONGEST_SEQUENCE
"""Tokens. Most pools are between these: large enough for several sequences, small enough to get full."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a run may use. All is on; turning something off narrows a failure down."""

    prefix_caching: bool = True
    host_tier: bool = True
    samples: bool = True
    beams: bool = True
    resume: bool = True
    lost_sessions: bool = True
    tenants: bool = True


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who comes. Lengths are the trace's times their scale, clipped to longest_total; gaps are the trace's, scaled.

    Shares are the parts of all requests that are like that: share_families begin with one of num_families common
    prefixes, share_turns continue an earlier request's prompt and output, share_repeats repeat one;
    share_flushes is the part of all steps behind which somebody flushes the prefix cache.
    share_killing bring the worker down with one of their steps. Tenants in front of others ask more often.
    alphabet: how many different tokens prompts are made of. mean_stay_s: how long an answer takes that need not wait;
    who leaves stays about as long.
    """

    prompt_scale: float
    output_scale: float
    longest_total: int
    mean_gap_s: float
    most_unfinished: int
    alphabet: int
    num_families: int
    share_families: float
    share_turns: float
    share_repeats: float
    share_bursts: float
    share_samples: float
    most_samples: int
    share_beams: float
    most_beams: int
    share_resumed: float
    share_stop_tokens: float
    share_stop_strings: float
    share_cancelled: float
    share_deadlines: float
    mean_stay_s: float
    share_failing: float
    share_impossible: float
    share_flushes: float
    num_priorities: int
    salts: tuple[str, ...]
    share_killing: float
    tenants: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Worker:
    """How the worker behaves. Times are in seconds; a step takes base_s + tokens * token_s, times a jitter.

    slow_s: how long each slow phase lasts, in which everything takes slow_factor times as long. mean_steps_to_loss:
    None for a worker that never dies. share_resized: losses behind which a worker with another pool comes.
    """

    base_s: float
    token_s: float
    network_s: float
    mean_steps_to_slow: float
    slow_factor: float
    slow_s: float
    mean_steps_to_loss: float | None
    share_hanging: float
    reconnect_s: float
    share_resized: float
    share_repeated: float
    share_stale: float
    share_misplaced: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run."""

    seed: int
    limits: Limits
    traffic: Traffic
    worker: Worker
    num_steps: int = STEPS
    features: Features = field(default_factory=Features)

    def describe(self) -> str:
        """Every setting, for people, a part a paragraph."""
        lines = [f"seed {self.seed}, {self.num_steps} steps"]
        for name, part in (
            ("features", self.features),
            ("limits", self.limits),
            ("traffic", self.traffic),
            ("worker", self.worker),
        ):
            values = []
            for entry in fields(part):
                value = getattr(part, entry.name)
                values.append(f"{entry.name}={value:.4g}" if isinstance(value, float) else f"{entry.name}={value!r}")
            lines.append(f"{name}: " + ", ".join(values))
        return "\n".join(lines)


def draw_scenario(seed: int, *, num_steps: int = STEPS, features: Features | None = None) -> Scenario:
    """The scenario of a seed. The same one always, whatever is switched off: features change no draw."""
    rng = random.Random(seed)
    features = features or Features()
    limits = draw_limits(rng, features)
    worker = _draw_worker(rng, features)
    traffic = _draw_traffic(rng, limits, worker, features)
    return Scenario(seed, limits, traffic, worker, num_steps, features)


def draw_limits(rng: random.Random, features: Features) -> Limits:
    """A worker's pools and the batch on it."""
    num_blocks = _log_uniform(rng, 4, 400)
    sizes = [size for size in (1, 2, 4, 4, 8, 8, 16, 16, 32) if TIGHT_POOL <= size * num_blocks <= ROOMY_POOL]
    block_size = rng.choice(sizes if rng.random() < 0.8 else [1, 8, 16, 32])
    num_host_blocks = _log_uniform(rng, 1, 2 * num_blocks) if rng.random() < 0.7 else 0
    max_num_seqs = rng.randint(1, 4) if rng.random() < 0.25 else _log_uniform(rng, 4, 24)
    budget = _log_uniform(rng, 2, 16) if rng.random() < 0.3 else _log_uniform(rng, 16, 256)
    max_model_len = 1 << 20 if rng.random() < 0.7 else max(8, rng.randint(1, num_blocks * block_size))
    swap_rate = rng.choice((0.0, 1e4, 1e6, 1e8, 1e9))
    chunked = rng.random() < 0.8
    return Limits(
        block_size=block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks if features.host_tier else 0,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_plans_in_flight=rng.choice((1, 2, 2, 2, 3, 4)),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=(rng.random() < 0.75) and features.prefix_caching,
        bytes_per_block=1024,
        swap_bytes_per_s=swap_rate,
        prefill_tokens_per_s=rng.choice((0.0, 1e2, 1e2, 1e3, 1e4)),
    )


def _draw_traffic(rng: random.Random, limits: Limits, worker: Worker, features: Features) -> Traffic:
    longest = min(LONGEST_SEQUENCE, limits.pool_tokens, limits.max_model_len)
    most_unfinished = rng.randint(2, 6) if rng.random() < 0.3 else _log_uniform(rng, 6, 32)
    num_together = min(limits.max_num_running, most_unfinished)
    # How often those who run together fill the pool, on the average.
    fullness = rng.choice((0.5, 1.5, 3.0, 6.0))
    mean_total = min(longest / 2, fullness * limits.pool_tokens / num_together)
    share_prompt, load = rng.choice((0.05, 0.3, 0.6, 0.9)), rng.choice((1.0, 3.0, 10.0))
    mean_output = mean_total * (1 - share_prompt)
    step_s = worker.base_s + worker.token_s * num_together + 2 * worker.network_s / limits.max_plans_in_flight
    has_priorities, has_salts = rng.random() < 0.4, rng.random() < 0.3
    return Traffic(
        prompt_scale=mean_total * share_prompt / mean_context_tokens(),
        output_scale=mean_output / mean_generated_tokens(),
        longest_total=longest,
        mean_gap_s=step_s * mean_output / num_together / load,
        most_unfinished=most_unfinished,
        alphabet=rng.choice((2, 4, 40)),
        num_families=rng.randint(1, 4),
        share_families=rng.choice((0.0, 0.4, 0.9)),
        share_turns=rng.choice((0.0, 0.2, 0.5)),
        share_repeats=rng.choice((0.0, 0.1, 0.3)),
        share_bursts=rng.choice((0.0, 0.1, 0.5)),
        share_samples=rng.choice((0.0, 0.2, 0.6)) * features.samples,
        most_samples=rng.choice((2, 4, 4, 8)),
        share_beams=rng.choice((0.0, 0.1, 0.4)) * features.beams,
        most_beams=rng.choice((2, 3, 4)),
        share_resumed=rng.choice((0.0, 0.1)) * features.resume,
        share_stop_tokens=rng.choice((0.0, 0.0, 0.3, 0.8)),
        share_stop_strings=rng.choice((0.0, 0.1, 0.3)),
        share_cancelled=rng.choice((0.0, 0.05, 0.2, 0.5)),
        share_deadlines=rng.choice((0.0, 0.1)),
        mean_stay_s=step_s * mean_output,
        share_failing=rng.choice((0.0, 0.0, 0.02, 0.1)),
        share_impossible=rng.choice((0.0, 0.02)),
        share_flushes=rng.choice((0.0, 0.0, 0.0, 0.01)),
        num_priorities=rng.randint(2, 3) if has_priorities else 1,
        salts=("", "a", "b") if has_salts else ("",),
        share_killing=rng.choice((0.0, 0.0, 0.0, 0.003, 0.02)) * features.lost_sessions,
        tenants=tuple("abcdefgh")[: rng.choice((1, 1, 2, 3, 8))] if features.tenants else ("",),
    )


def _draw_worker(rng: random.Random, features: Features) -> Worker:
    mean_steps_to_loss = rng.choice((None, None, 30.0, 100.0, 300.0))
    base_s = rng.choice((0.002, 0.01))
    return Worker(
        base_s=base_s,
        token_s=rng.choice((0.0, base_s / 50)),
        network_s=base_s * rng.choice((0.0, 0.1, 2.0)),
        mean_steps_to_slow=rng.choice((50.0, 1e9)),
        slow_factor=rng.uniform(5, 50),
        slow_s=base_s * rng.uniform(20, 500),
        mean_steps_to_loss=mean_steps_to_loss if features.lost_sessions else None,
        share_hanging=rng.choice((0.0, 0.5, 1.0)),
        reconnect_s=base_s * rng.choice((0.0, 10.0, 200.0)),
        share_resized=rng.choice((0.0, 0.3)),
        share_repeated=rng.choice((0.0, 0.05)),
        share_stale=rng.choice((0.2, 1.0)),
        share_misplaced=rng.choice((0.0, 0.0, 0.0, 0.01)) if features.lost_sessions else 0.0,
    )


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    """A whole number between both, each order of magnitude as likely as another."""
    return min(most, int(math.exp(rng.uniform(math.log(least), math.log(most + 1)))))
