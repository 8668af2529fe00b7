"""The pretended model, and what each request has to give under it.

The model's state behind a token is a digest of all tokens up to there, the way keys and values depend on everything
before them. The worker of the simulation writes these digests into its memory and samples from what it reads back; the
oracle here runs the same model over a request alone, with no batch, no blocks and no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo_router.beam_search import BeamSearch, Hypothesis
from octavo_router.request import FinishReason, Request

VOCAB_SIZE = 47
"""A prime, so that stepping through the vocabulary by any stride meets every token."""
EOS_TOKEN_ID = 1
EMPTY = 0x243F6A8885A308D3
"""The digest of no tokens."""

_MASK = (1 << 64) - 1


def extend(digest: int, token_id: int) -> int:
    """The digest of some tokens and one more."""
    digest = ((digest ^ (token_id + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return digest ^ (digest >> 29)


def digests(token_ids: Sequence[int], start: int = EMPTY) -> list[int]:
    """The digest behind each token."""
    result = []
    for token_id in token_ids:
        start = extend(start, token_id)
        result.append(start)
    return result


def next_token(digest: int, seed: int, suppressed: Sequence[int] = ()) -> int:
    """What is sampled behind some tokens: it depends on them, on the seed and on nothing else."""
    token_id = extend(digest, seed & _MASK) % VOCAB_SIZE
    while token_id in suppressed:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def logprob(digest: int, token_id: int) -> float:
    """The log-probability that the model gives a token: a multiple of 1/64, so that sums are exact."""
    return -(1 + extend(digest, token_id + VOCAB_SIZE) % 512) / 64


def prompt_scores(token_ids: Sequence[int]) -> list[tuple[int, float]]:
    """The tokens of a prompt from the second on, each with its log-probability."""
    states = digests(token_ids[:-1])
    return [(token_id, logprob(state, token_id)) for token_id, state in zip(token_ids[1:], states, strict=True)]


def candidates(digest: int, count: int, suppressed: Sequence[int] = ()) -> list[tuple[int, float]]:
    """The likeliest tokens, likeliest first. Log-probabilities are multiples of 1/64, so that their sums are exact."""
    token_id, stride = digest % VOCAB_SIZE, 1 + (digest >> 8) % (VOCAB_SIZE - 1)
    value, steps = 1 + (digest >> 16) % 16, digest >> 24
    ranked: list[tuple[int, float]] = []
    for _ in range(VOCAB_SIZE):
        if token_id not in suppressed:
            ranked.append((token_id, -value / 64))
            if len(ranked) == count:
                break
        token_id = (token_id + stride) % VOCAB_SIZE
        value += 1 + steps % 32
        steps >>= 2
    return ranked


def stop_ids(request: Request) -> frozenset[int]:
    """The tokens that end a sample."""
    stopping = request.stopping
    return stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | {EOS_TOKEN_ID}


@dataclass(frozen=True, slots=True)
class ExpectedSample:
    """What one sample has to be. reason is None where the caller's own stop string ends it."""

    token_ids: list[int]
    reason: FinishReason | None


def expected_sample(request: Request, sample_index: int, stops_after: int | None = None) -> ExpectedSample:
    """Generates one sample alone. stops_after: tokens behind which a stop string of the caller's is found."""
    stopping, ends = request.stopping, stop_ids(request)
    suppressed = tuple(sorted(ends)) if stopping.min_tokens else ()
    seed = request.sampling.seed + sample_index
    digest = digests(request.prompt_token_ids)[-1]
    output: list[int] = []
    while len(output) < stopping.max_tokens:
        token_id = next_token(digest, seed, suppressed if len(output) < stopping.min_tokens else ())
        output.append(token_id)
        if token_id in ends:
            return ExpectedSample(output, FinishReason.STOP)
        if len(output) == stops_after and len(output) < stopping.max_tokens:
            return ExpectedSample(output, None)
        digest = extend(digest, token_id)
    return ExpectedSample(output, FinishReason.LENGTH)


class ExpectedSearch(NamedTuple):
    """What a beam search has to find, and all it visits: (place of the parent, token), place 0 being the prompt."""

    hypotheses: list[Hypothesis]
    visited: list[tuple[int, int]]


def expected_search(request: Request) -> ExpectedSearch:
    """Searches alone. A beam is its place among all that were visited; nothing is ever copied or dropped."""
    beams = request.sampling.beams
    assert beams is not None
    ends = stop_ids(request)
    suppressed = tuple(sorted(ends)) if request.stopping.min_tokens else ()
    search = BeamSearch(beams, max_tokens=request.stopping.max_tokens, eos_token_ids=ends)
    states = [digests(request.prompt_token_ids)[-1]]
    visited: list[tuple[int, int]] = []
    places, num_output = [0], 0
    while True:
        banned = suppressed if num_output < request.stopping.min_tokens else ()
        step = search.step([candidates(states[place], search.num_candidates, banned) for place in places])
        if step.is_done:
            return ExpectedSearch(search.hypotheses(request.sampling.n), visited)
        visited += [(places[parent], token_id) for parent, token_id in zip(step.parents, step.token_ids, strict=True)]
        places = list(range(len(states), len(states) + len(step.parents)))
        states += [extend(states[parent], token_id) for parent, token_id in visited[places[0] - 1 :]]
        num_output += 1
