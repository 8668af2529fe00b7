"""Requests as they come in a scenario, each with what it has to give and with what its caller does to it.

Lengths and gaps are the trace's. Prompts share prefixes by families, repeat, and continue what an earlier request gave.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from octavo_router.beam_search import Hypothesis
from octavo_router.limits import Limits
from octavo_router.request import (
    Beams,
    EarlyStopping,
    FinishReason,
    Output,
    Request,
    ResumedSample,
    Sampling,
    Stopping,
)
from tests.simulator.oracle import (
    VOCAB_SIZE,
    ExpectedSample,
    expected_sample,
    expected_search,
)
from tests.simulator.scenario import Scenario
from tests.simulator.trace import traced_requests

MOST_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and its fate.

    gap_s: since the arrival before. samples or hypotheses: what it gives; visited: the beams
    on the way there. held: tokens of each sample that its caller
    holds already. leaves_after_s, leaves_after_tokens: when its caller leaves, after so long or so many tokens of all
    samples. fails_at: (sample, output tokens) at which the worker fails on it, kills_at: at which it dies of it.
    is_impossible: it must be refused.
    """

    gap_s: float
    request: Request
    samples: list[ExpectedSample]
    hypotheses: list[Hypothesis] | None = None
    visited: list[tuple[int, int]] | None = None
    held: list[int] = field(default_factory=list)
    leaves_after_s: float | None = None
    leaves_after_tokens: int | None = None
    fails_at: tuple[int, int] | None = None
    kills_at: tuple[int, int] | None = None
    is_impossible: bool = False

    def fails(self, sample_index: int, num_output: int) -> bool:
        """Whether the worker fails on this step of this sample."""
        return self.fails_at == (sample_index, num_output)

    def kills(self, sample_index: int, num_output: int) -> bool:
        """Whether the worker dies of this step of this sample."""
        return self.kills_at == (sample_index, num_output)


class TrafficSource:
    """Draws one arrival after the other, for as long as it is asked."""

    def __init__(self, scenario: Scenario) -> None:
        self._rng = random.Random(f"traffic {scenario.seed}")
        self._fates = random.Random(f"fates {scenario.seed}")
        self._scoring = random.Random(f"scoring {scenario.seed}")
        self._settings = scenario.traffic
        self._limits = scenario.limits
        self._longest = scenario.traffic.longest_total
        self._trace = traced_requests()
        self._place = self._rng.randrange(len(self._trace))
        self._mean_trace_gap_ms = sum(row.gap_ms for row in self._trace) / len(self._trace)
        longest = self._settings.longest_total
        self._families = [self._tokens(self._rng.randint(1, longest)) for _ in range(self._settings.num_families)]
        self._remembered: list[tuple[list[int], str]] = []
        self._burst = 0
        self._num_drawn = 0

    def draw(self, limits: Limits) -> Arrival:
        """The next arrival. limits: of the worker that is there now; most requests fit it."""
        rng, settings = self._rng, self._settings
        self._limits = limits
        self._longest = min(settings.longest_total, limits.pool_tokens, limits.max_model_len)
        self._num_drawn += 1
        self._place = (self._place + 1) % len(self._trace)
        traced = self._trace[self._place]
        num_output = max(1, round(traced.num_generated_tokens * settings.output_scale))
        num_prompt = max(1, round(traced.num_context_tokens * settings.prompt_scale))
        prompt, salt = self._prompt(num_prompt)
        max_tokens = min(num_output, max(1, self._longest - len(prompt)))
        prompt = prompt[: max(1, self._longest - max_tokens)]
        is_impossible = rng.random() < settings.share_impossible
        if is_impossible:
            max_tokens = min(self._limits.pool_tokens, self._limits.max_model_len) - len(prompt) + rng.randint(1, 9)
        sampling = self._sampling()
        if sampling.beams is not None:
            max_tokens = max_tokens if is_impossible else min(max_tokens, 24)
        request = Request(
            request_id=f"r{self._num_drawn}",
            prompt_token_ids=prompt,
            sampling=sampling,
            stopping=self._stopping(max_tokens),
            output=Output(
                logprobs=rng.choice((0, 2)) if rng.random() < 0.2 else None,
                prompt_logprobs=self._scoring.randrange(3) if self._scoring.random() < 0.15 else None,
            ),
            priority=rng.randrange(settings.num_priorities),
            cache_salt=salt,
            tenant=self._tenant(),
        )
        arrival = self._with_fate(self._gap_s(traced.gap_ms), request, is_impossible)
        if self._fates.random() < settings.share_killing and request.sampling.seed < 1 << 32 and not is_impossible:
            arrival = replace(arrival, kills_at=self._kills_at(arrival.request))
        if self._scoring.random() < 0.05 and _may_be_prompt_only(arrival):
            arrival = _prompt_only(arrival)
        self._remember(arrival)
        return arrival

    def _tenant(self) -> str:
        """The first one asks half of the time, the second half of the rest, and so on."""
        tenants = self._settings.tenants
        index = 0
        while index < len(tenants) - 1 and self._fates.random() < 0.5:
            index += 1
        return tenants[index]

    def _kills_at(self, request: Request) -> tuple[int, int]:
        if request.sampling.beams is not None:
            return 0, 0
        most = min(9, request.stopping.max_tokens - 1)
        return self._fates.randrange(num_samples(request)), self._fates.choice((0, self._fates.randint(0, most)))

    def _gap_s(self, traced_gap_ms: int) -> float:
        """Time to this arrival; none within a burst."""
        if self._burst:
            self._burst -= 1
            return 0.0
        if self._rng.random() < self._settings.share_bursts:
            self._burst = self._rng.randint(1, 6)
        return self._settings.mean_gap_s * traced_gap_ms / self._mean_trace_gap_ms

    # Prompts

    def _tokens(self, count: int) -> list[int]:
        return [2 + self._rng.randrange(self._settings.alphabet) for _ in range(count)]

    def _prompt(self, num_prompt: int) -> tuple[list[int], str]:
        """A prompt of at most the longest length and its salt."""
        rng, settings = self._rng, self._settings
        most = self._limits.max_num_batched_tokens
        if self._limits.enable_chunked_prefill:
            most = self._longest
        salt = rng.choice(settings.salts)
        draw = rng.random()
        if self._remembered and draw < settings.share_turns:
            earlier, salt = rng.choice(self._remembered)
            prompt = earlier + self._tokens(rng.randint(0, num_prompt))
        elif self._remembered and draw < settings.share_turns + settings.share_repeats:
            prompt, salt = rng.choice(self._remembered)
        elif rng.random() < settings.share_families:
            family = rng.choice(self._families)
            prompt = family[: rng.choice((num_prompt, len(family)))] + self._tokens(rng.randint(0, num_prompt))
        else:
            prompt = self._tokens(num_prompt)
        longest = min(most, max(1, self._longest - 1))
        return prompt[:longest] or self._tokens(1), salt

    def _remember(self, arrival: Arrival) -> None:
        """Keeps a request's tokens for others to begin with."""
        if arrival.is_impossible or arrival.fails_at is not None or arrival.kills_at is not None:
            return
        request = arrival.request
        prompt = list(request.prompt_token_ids)
        if arrival.hypotheses is not None:
            tokens = [*prompt, *arrival.hypotheses[0].token_ids] if arrival.hypotheses else prompt
        else:
            tokens = prompt + self._rng.choice(arrival.samples).token_ids
        tokens = self._rng.choice((prompt, tokens, tokens[: self._rng.randint(1, len(tokens))]))
        if len(self._remembered) == MOST_REMEMBERED:
            self._remembered[self._rng.randrange(MOST_REMEMBERED)] = (tokens, request.cache_salt)
        else:
            self._remembered.append((tokens, request.cache_salt))

    # Parameters

    def _sampling(self) -> Sampling:
        rng, settings = self._rng, self._settings
        seed = rng.choice((rng.randrange(1 << 32), (1 << 64) - 1 - rng.randrange(3)))
        draw = rng.random()
        if draw < settings.share_beams:
            most = (
                settings.most_beams if rng.random() < 0.05 else min(settings.most_beams, self._limits.max_num_running)
            )
            width = rng.randint(1, most)
            beams = Beams(width, rng.choice((0.5, 1.0, 2.0)), rng.choice(tuple(EarlyStopping)))
            return Sampling(seed=seed, n=(n := rng.randint(1, width)), best_of=n, beams=beams)
        if draw < settings.share_beams + settings.share_samples:
            best_of = rng.randint(1, settings.most_samples)
            return Sampling(seed=seed, n=rng.randint(1, best_of), best_of=best_of)
        return Sampling(seed=seed)

    def _stopping(self, max_tokens: int) -> Stopping:
        rng = self._rng
        has_stops = rng.random() < self._settings.share_stop_tokens
        stops = frozenset(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3))) if has_stops else frozenset()
        return Stopping(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.1 else 0,
            stop_token_ids=stops,
            ignore_eos=not has_stops,
        )

    # Fates

    def _with_fate(self, gap_s: float, request: Request, is_impossible: bool) -> Arrival:
        rng, settings = self._rng, self._settings
        leaves_after_s = leaves_after_tokens = None
        if rng.random() < settings.share_cancelled:
            if rng.random() < 0.4:
                leaves_after_tokens = rng.randint(1, max(1, request.stopping.max_tokens))
            else:
                leaves_after_s = settings.mean_stay_s * rng.choice((0.0, rng.expovariate(10.0), rng.expovariate(1.0)))
        elif rng.random() < settings.share_deadlines:
            leaves_after_s = 3 * settings.mean_stay_s * rng.expovariate(1.0)
        if is_impossible:
            return Arrival(gap_s, request, [], is_impossible=True)
        fails_at = None
        if rng.random() < settings.share_failing and request.sampling.seed < 1 << 32:  # a sampling key of its own
            fails_at = (rng.randrange(num_samples(request)), rng.choice((0, 0, rng.randint(0, 9))))
        if request.sampling.beams is not None:
            search = expected_search(request)
            return Arrival(
                gap_s,
                request,
                [],
                hypotheses=search.hypotheses,
                visited=search.visited,
                leaves_after_s=leaves_after_s,
                fails_at=None if fails_at is None else (0, 0),
            )
        samples = [expected_sample(request, index, self._stops_after(request)) for index in range(num_samples(request))]
        request, held = self._resumed(request, samples)
        return Arrival(
            gap_s,
            request,
            samples,
            held=held,
            leaves_after_s=leaves_after_s,
            leaves_after_tokens=leaves_after_tokens,
            fails_at=fails_at,
        )

    def _stops_after(self, request: Request) -> int | None:
        """Output tokens behind which a stop string matches, for those that have one."""
        has_string = self._rng.random() < self._settings.share_stop_strings
        return self._rng.randint(1, request.stopping.max_tokens) if has_string else None

    def _resumed(self, request: Request, samples: list[ExpectedSample]) -> tuple[Request, list[int]]:
        """The request as somebody sends it who holds a part of its output already, and how much of each sample."""
        rng = self._rng
        held = [0] * len(samples)
        if rng.random() >= self._settings.share_resumed or request.sampling.best_of > request.sampling.n:
            return request, held
        resumed = []
        goes_on = rng.randrange(len(samples))
        for index, sample in enumerate(samples):
            has_ended = index != goes_on and sample.reason is not None and rng.random() < 0.3
            held[index] = len(sample.token_ids) if has_ended else rng.randrange(len(sample.token_ids))
            if held[index]:
                reason: FinishReason | None = sample.reason if has_ended else None
                resumed.append(ResumedSample(index, tuple(sample.token_ids[: held[index]]), 0, reason))
        return Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            stopping=request.stopping,
            output=request.output,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            resumed=tuple(resumed),
        ), held


def _may_be_prompt_only(arrival: Arrival) -> bool:
    """Whether nothing is to happen to an arrival's output."""
    request = arrival.request
    has_fate = arrival.is_impossible or arrival.fails_at is not None or arrival.kills_at is not None
    is_plain = request.sampling.beams is None and request.sampling.best_of == request.sampling.n
    return is_plain and not has_fate and not request.resumed


def _prompt_only(arrival: Arrival) -> Arrival:
    """The same for nothing but its prompt, with its log-probabilities or without."""
    request = replace(arrival.request, stopping=Stopping(max_tokens=0))
    samples = [ExpectedSample([], FinishReason.LENGTH)] * request.sampling.n
    return replace(arrival, request=request, samples=samples, leaves_after_tokens=None)


def num_samples(request: Request) -> int:
    """Sequences that a request without beams runs."""
    return max(request.sampling.n, request.sampling.best_of)


def num_sequences(request: Request) -> int:
    """Sequences that a request runs at once where nothing hinders it."""
    beams = request.sampling.beams
    return beams.beam_width if beams is not None else num_samples(request)


def may_be_refused(request: Request, limits: Limits) -> bool:
    """Whether a request is so large that refusing it is right: its sequences do not all fit side by side."""
    total = len(request.prompt_token_ids) + request.stopping.max_tokens
    num_blocks = num_sequences(request) * -(-total // limits.block_size)
    count = num_sequences(request)
    return must_be_refused(request, limits) or (
        count > 1 and (num_blocks > limits.num_device_blocks or count > limits.max_num_running)
    )


def must_be_refused(request: Request, limits: Limits) -> bool:
    """Whether not even one of its sequences could ever run to its end."""
    num_prompt = len(request.prompt_token_ids)
    total = num_prompt + request.stopping.max_tokens
    return total > min(limits.pool_tokens, limits.max_model_len) or (
        not limits.enable_chunked_prefill and num_prompt > limits.max_num_batched_tokens
    )
