"""The router's Prometheus metrics, in a registry of their own.

Counters and histograms are told what happened. Gauges are read from the scheduler when they are scraped, so that none
can be stale. Where a scheduler's numbers come from is the engine's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.errors import OctavoError, mapping_of
from octavo_router.counts import Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_DEADLINE = "deadline"
FINISH_ERROR = "error"
FINISH_REASONS = (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_DEADLINE, FINISH_ERROR)

REFUSED_INVALID = "invalid"
REFUSED_OVERLOADED = "overloaded"
REFUSED_UNAVAILABLE = "unavailable"
REFUSED_TOO_LONG = "too_long"
REFUSED_ERROR = "error"
# By the reason of an error's row in ERROR_TABLE; what is not here is an error of the server.
_REFUSALS = {
    "INVALID_REQUEST": REFUSED_INVALID,
    "CONTEXT_LENGTH_EXCEEDED": REFUSED_TOO_LONG,
    "REQUEST_TOO_LARGE": "too_large",
    "UNSUPPORTED": "unsupported",
    "MODEL_NOT_FOUND": "model_not_found",
    "RESUME_MISMATCH": "resume_mismatch",
    "OVERLOADED": REFUSED_OVERLOADED,
    "UNAVAILABLE": REFUSED_UNAVAILABLE,
    "DEADLINE_EXCEEDED": FINISH_DEADLINE,
    "CANCELLED": FINISH_ABORT,
}
REFUSAL_REASONS = (*_REFUSALS.values(), REFUSED_ERROR)

_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_REQUEST_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_TURNAROUND_S = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5,
)  # fmt: skip
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Gauges:
    """The present state, as gauges show it, and what the scheduler has counted since the router started.

    Used blocks are those that sequences hold; cached ones hold prefixes and can be taken.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_preempted: int = 0
    num_requests: int = 0
    num_waiting_prompt_tokens: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    is_connected: bool = False
    counts: Counts = field(default_factory=Counts)


class Metrics:
    """Everything that `/metrics` shows. One per router.

    num_accepted, num_prompt_tokens, num_generation_tokens: what the counters of these names hold, for others to read.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.num_accepted = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._gauges = _GaugeCollector(self.registry)
        self._accepted = self._counter("octavo_requests_accepted", "Requests that were taken in.")
        self._finished = self._counter("octavo_requests_finished", "Requests that ended, by reason.", "reason")
        self._refused = self._counter(
            "octavo_requests_refused", "Requests that were not accepted, by reason.", "reason"
        )
        self._unauthenticated = self._counter(
            "octavo_unauthenticated_calls", "Calls of any kind that carried no good key, where one is needed."
        )
        self._prompt_tokens = self._counter("octavo_prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = self._counter("octavo_generation_tokens", "Tokens generated and delivered.")
        self._sessions_lost = self._counter("octavo_sessions_lost", "Sessions with the worker that were lost.")
        self._worker_idle = self._counter("octavo_worker_idle_seconds", "Time the executor waited for plans.")
        self._worker_gap = self._counter(
            "octavo_worker_gap_seconds", "Of that, between a step and the next that followed on it."
        )
        self._first_token = self._histogram(
            "octavo_time_to_first_token_seconds", "From arrival to the first token of a request.", _FIRST_TOKEN_S
        )
        self._token = self._histogram(
            "octavo_time_per_output_token_seconds", "Mean time between tokens of a sample, behind its first.", _TOKEN_S
        )
        self._latency = self._histogram(
            "octavo_request_latency_seconds", "From arrival to end, of requests that finished.", _REQUEST_S
        )
        self._queue = self._histogram("octavo_queue_time_seconds", "From arrival to the first plan.", _QUEUE_S)
        self._step = self._histogram("octavo_step_duration_seconds", "Time the executor took for a step.", _STEP_S)
        self._step_tokens = self._histogram("octavo_step_tokens", "Tokens that a step computed.", _STEP_TOKENS)
        self._turnaround = self._histogram(
            "octavo_plan_turnaround_seconds", "From a step's result to the next plan on its way.", _TURNAROUND_S
        )
        for reason in FINISH_REASONS:
            self._finished.labels(reason)
        for reason in REFUSAL_REASONS:
            self._refused.labels(reason)

    def watch(self, read: Callable[[], Gauges]) -> None:
        """Gauges are read by this function from now on."""
        self._gauges.read = read

    def render(self) -> bytes:
        """The exposition, in the format that CONTENT_TYPE names."""
        return generate_latest(self.registry)

    def accepted(self, num_prompt_tokens: int) -> None:
        """A request was taken in."""
        self._accepted.inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self.num_accepted += 1
        self.num_prompt_tokens += num_prompt_tokens

    def unauthenticated(self) -> None:
        """A call came without a good key. It is no request, and is counted here alone."""
        self._unauthenticated.inc()

    def refused(self, reason: str) -> None:
        """A request was not taken in; one of REFUSAL_REASONS."""
        self._refused.labels(reason).inc()

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts the error that leaves the block as the refusal of a request. Blocks must not be nested."""
        try:
            yield
        except OctavoError as error:
            self.refused(_REFUSALS.get(mapping_of(error).reason, REFUSED_ERROR))
            raise
        except Exception:
            self.refused(REFUSED_ERROR)
            raise
        except BaseException:
            # Cancelled, or closed: the caller left before it had an answer.
            self.refused(FINISH_ABORT)
            raise

    def started(self, queue_s: float) -> None:
        """A request was planned for the first time."""
        self._queue.observe(queue_s)

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after its arrival."""
        self._first_token.observe(seconds)

    def tokens(self, num_tokens: int) -> None:
        """Tokens were delivered."""
        self._generation_tokens.inc(num_tokens)
        self.num_generation_tokens += num_tokens

    def sample_finished(self, seconds: float, num_tokens: int) -> None:
        """A sample ended: so long after its first token came its last."""
        if num_tokens > 1:
            self._token.observe(seconds / (num_tokens - 1))

    def request_finished(self, reason: str, latency_s: float) -> None:
        """A request ended; one of FINISH_REASONS. Latency counts for those that ran to their end."""
        self._finished.labels(reason).inc()
        if reason in (FINISH_STOP, FINISH_LENGTH):
            self._latency.observe(latency_s)

    def step(self, *, num_tokens: int, duration_s: float, idle_s: float, is_between: bool) -> None:
        """A step was answered. is_between: the executor's wait before it was between two steps, and no rest."""
        self._step.observe(duration_s)
        self._step_tokens.observe(num_tokens)
        self._worker_idle.inc(idle_s)
        if is_between:
            self._worker_gap.inc(idle_s)

    def turnaround(self, seconds: float) -> None:
        """So long after a step's result the next plan was on its way."""
        self._turnaround.observe(seconds)

    def session_lost(self) -> None:
        """The worker was lost."""
        self._sessions_lost.inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, buckets=tuple(buckets), registry=self.registry)


class _GaugeCollector(Collector):
    """Reads the gauges at scrape time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.read: Callable[[], Gauges] = Gauges
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        now = self.read()
        return [*_gauges(now), *_counters(now.counts)]


def _gauges(now: Gauges) -> Iterable[Metric]:
    usage = now.num_used_blocks / now.num_blocks if now.num_blocks else 0.0
    for name, text, value in (
        ("octavo_sequences_waiting", "Sequences that wait for their first step.", now.num_waiting),
        ("octavo_sequences_running", "Sequences in the batch.", now.num_running),
        ("octavo_sequences_preempted", "Sequences that lost their blocks and wait to go on.", now.num_preempted),
        ("octavo_requests_unfinished", "Requests that have not ended.", now.num_requests),
        ("octavo_waiting_prompt_tokens", "Prompt tokens of requests that wait.", now.num_waiting_prompt_tokens),
        ("octavo_kv_usage_ratio", "Share of the device's KV blocks that sequences hold.", usage),
        ("octavo_worker_connected", "Whether there is a session with the worker.", float(now.is_connected)),
    ):
        yield GaugeMetricFamily(name, text, value)
    for name, text, device, host in (
        ("octavo_kv_blocks_total", "KV blocks.", now.num_blocks, now.num_host_blocks),
        ("octavo_kv_blocks_used", "KV blocks that sequences hold.", now.num_used_blocks, now.num_used_host_blocks),
        (
            "octavo_kv_blocks_cached",
            "KV blocks that hold cached prefixes and can be taken.",
            now.num_cached_blocks,
            now.num_cached_host_blocks,
        ),
    ):
        by_tier = GaugeMetricFamily(name, text, labels=["tier"])
        by_tier.add_metric(["device"], device)
        by_tier.add_metric(["host"], host)
        yield by_tier


def _counters(counts: Counts) -> Iterable[Metric]:
    for name, text, value in (
        ("octavo_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.num_prefix_query_tokens),
        ("octavo_prefix_cache_evictions", "Cached blocks that left the device for want of room.", counts.num_evictions),
        ("octavo_prefix_cache_demotions", "Evicted blocks that went to the host.", counts.num_demotions),
        ("octavo_kv_blocks_copied", "KV blocks copied on write.", counts.num_copied_blocks),
        (
            "octavo_priority_preemptions",
            "Sequences that were preempted for a request with a better priority.",
            counts.num_priority_preemptions,
        ),
    ):
        yield CounterMetricFamily(name, text, value)
    num_device_hits = counts.num_prefix_hit_tokens - counts.num_prefix_hit_host_tokens
    for name, text, label, values in (
        (
            "octavo_prefix_cache_hits",
            "Prompt tokens found in the prefix cache, by tier.",
            "tier",
            {"device": num_device_hits, "host": counts.num_prefix_hit_host_tokens},
        ),
        (
            "octavo_kv_blocks_swapped",
            "KV blocks moved between the tiers: out is from device to host.",
            "direction",
            {"out": counts.num_swapped_out_blocks, "in": counts.num_swapped_in_blocks},
        ),
        (
            "octavo_preemptions",
            "Sequences that were preempted, by what became of their blocks.",
            "kind",
            {"swap": counts.num_swap_preemptions, "recompute": counts.num_recompute_preemptions},
        ),
    ):
        counter = CounterMetricFamily(name, text, labels=[label])
        for value_label, count in values.items():
            counter.add_metric([value_label], count)
        yield counter
