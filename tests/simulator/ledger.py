"""What was promised to whom, what came, and how it ended: the simulation's callers.

Every event of the scheduler is checked on arrival against what its request has to give, and at the end every accepted
request must have ended exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo_router.beam_search import Hypothesis
from octavo_router.request import FinishReason
from octavo_router.results import Event, PromptComputed, RequestFailed, TokenSampled
from octavo_router.sequence import SequenceGroup
from tests.simulator.oracle import digests, extend, logprob, prompt_scores
from tests.simulator.traffic import Arrival

FEWEST_DEATHS, FEWEST_DEATHS_ALONE = 3, 2
"""Of the worker, before a request may be blamed for them."""


class LedgerError(AssertionError):
    """A request got what it should not have got, or did not get what it should have."""


@dataclass(slots=True)
class Entry:
    """One accepted request. outcome: None until it has ended; then "finished", "failed", "blamed", "left" or "too
    large". num_deaths: of the worker with this request in a plan in flight, num_deaths_alone: with no other, num_kills:
    that it caused."""

    arrival: Arrival
    group: SequenceGroup
    tokens: list[list[int]]
    is_ended: list[bool]
    states: list[int]
    num_tokens: int = 0
    num_deaths: int = 0
    num_deaths_alone: int = 0
    num_kills: int = 0
    is_scored: bool = False
    outcome: str | None = None

    @property
    def name(self) -> str:
        return self.arrival.request.request_id


@dataclass(slots=True)
class Ledger:
    """All requests of a run, open and closed."""

    open: dict[int, Entry] = field(default_factory=dict)
    closed: list[Entry] = field(default_factory=list)
    num_tokens: int = 0

    def accept(self, arrival: Arrival, group: SequenceGroup) -> Entry:
        """A request was taken in. Samples that its caller holds in full have ended."""
        state = digests(arrival.request.prompt_token_ids)[-1]
        entry = Entry(arrival, group, [], [], [])
        for index, sample in enumerate(arrival.samples):
            held = sample.token_ids[: arrival.held[index]]
            entry.tokens.append(list(held))
            entry.is_ended.append(
                any(
                    resumed.sample_index == index and resumed.finish_reason is not None
                    for resumed in arrival.request.resumed
                )
            )
            entry.states.append(digests(held, state)[-1] if held else state)
        self.open[group.arrival] = entry
        return entry

    def close(self, entry: Entry, outcome: str) -> None:
        """A request has ended, once and for all."""
        if entry.outcome is not None:
            raise LedgerError(f"{entry.name} ended as {entry.outcome} and again as {outcome}")
        entry.outcome = outcome
        del self.open[entry.group.arrival]
        self.closed.append(entry)

    def entry_of(self, event: Event) -> Entry:
        """The open request that an event is about."""
        group = event.sequence.group if isinstance(event, TokenSampled) else event.group
        entry = self.open.get(group.arrival)
        if entry is None or entry.group is not group:
            raise LedgerError(f"{group.request.request_id} has ended, and there comes {type(event).__name__}")
        return entry

    def token(self, entry: Entry, event: TokenSampled) -> bool:
        """Takes in a token. Returns whether the caller's stop string is found with it."""
        index, token_id = event.sequence.sample_index, event.token_id
        if entry.arrival.hypotheses is not None:
            raise LedgerError(f"{entry.name} searches with beams, and there comes a token")
        expected, tokens = entry.arrival.samples[index], entry.tokens[index]
        name = f"{entry.name}.{index}"
        if entry.is_ended[index]:
            raise LedgerError(f"{name} has ended with {len(tokens)} tokens, and there comes another: {token_id}")
        if len(tokens) >= len(expected.token_ids) or expected.token_ids[len(tokens)] != token_id:
            right = expected.token_ids[len(tokens) : len(tokens) + 1] or "the end"
            raise LedgerError(f"{name} got token {token_id} at {len(tokens)}, right is {right}")
        if entry.arrival.fails(index, len(tokens)):
            raise LedgerError(f"{name} got token {token_id} at {len(tokens)}, where the worker fails on it")
        if entry.arrival.kills(index, len(tokens)):
            raise LedgerError(f"{name} got token {token_id} at {len(tokens)}, where the worker dies of it")
        self._check_logprobs(entry, event)
        scores = entry.group.prompt_scores
        if scores is not None and not scores.is_complete:
            raise LedgerError(f"{name} got a token before the log-probabilities of its prompt")
        tokens.append(token_id)
        entry.states[index] = extend(entry.states[index], token_id)
        entry.num_tokens += 1
        self.num_tokens += 1
        is_last = len(tokens) == len(expected.token_ids)
        if event.finish_reason is not (expected.reason if is_last else None):
            raise LedgerError(
                f"{name} has {event.finish_reason} behind {len(tokens)} of {len(expected.token_ids)} tokens"
            )
        if (event.matched is not None) is not (event.finish_reason is FinishReason.STOP):
            raise LedgerError(f"{name} matched {event.matched} and ended by {event.finish_reason}")
        entry.is_ended[index] = is_last
        if all(entry.is_ended):
            self.close(entry, "finished")
        return is_last and expected.reason is None

    @staticmethod
    def _check_logprobs(entry: Entry, event: TokenSampled) -> None:
        request = entry.arrival.request
        is_asked = request.output.logprobs is not None or request.sampling.best_of > request.sampling.n
        if is_asked is not (event.logprobs is not None):
            raise LedgerError(f"{entry.name}: log-probabilities {'are missing' if is_asked else 'were not asked for'}")
        state = entry.states[event.sequence.sample_index]
        if event.logprobs is not None and event.logprobs.logprob != logprob(state, event.token_id):
            raise LedgerError(f"{entry.name}: another token's log-probability came with token {event.token_id}")

    def prompt(self, entry: Entry, event: PromptComputed) -> None:
        """Takes in that a prompt's log-probabilities are there, or that it is all that is wanted."""
        scores, prompt = entry.group.prompt_scores, entry.arrival.request.prompt_token_ids
        is_all = entry.arrival.request.stopping.max_tokens == 0
        if entry.is_scored or event.is_end is not is_all or (scores is None and not is_all):
            raise LedgerError(f"{entry.name} did not ask for its prompt, or has it, and there it comes")
        entry.is_scored = True
        if is_all:
            entry.is_ended = [True] * len(entry.is_ended)
            self.close(entry, "finished")
        if scores is None:
            return
        if not scores.is_complete:
            raise LedgerError(f"{entry.name} has the log-probabilities of {scores.num_scored} of {len(prompt)} tokens")
        found = [(score.token_id, score.logprob) for score in scores.entries(prompt)]
        if found != prompt_scores(prompt):
            raise LedgerError(f"{entry.name} has other log-probabilities of its prompt than are right")

    def beams(self, entry: Entry, hypotheses: list[Hypothesis]) -> None:
        """Takes in the end of a beam search."""
        right = entry.arrival.hypotheses
        if right is None:
            raise LedgerError(f"{entry.name} does not search with beams, and there comes a search's end")
        if hypotheses[: entry.arrival.request.sampling.n] != right:
            raise LedgerError(f"{entry.name} found {hypotheses}, right is {right}")
        entry.num_tokens += sum(len(hypothesis.token_ids) for hypothesis in right)
        self.num_tokens += entry.num_tokens
        self.close(entry, "finished")

    def failed(self, entry: Entry, event: RequestFailed) -> None:
        """Takes in a failure on the worker. One is right only where the worker was told to fail."""
        fails_at = entry.arrival.fails_at
        if fails_at is None:
            raise LedgerError(f"{entry.name} failed for no reason: {event.message}")
        index, num_output = fails_at
        if entry.arrival.hypotheses is None and len(entry.tokens[index]) < num_output:
            raise LedgerError(f"{entry.name} failed before the worker did: {event.message}")
        self.close(entry, "failed")

    def blamed(self, entry: Entry, event: RequestFailed) -> None:
        """Takes in that a request is held to have killed the worker."""
        if entry.num_deaths < FEWEST_DEATHS or entry.num_deaths_alone < FEWEST_DEATHS_ALONE:
            raise LedgerError(
                f"{entry.name} is blamed, though the worker died {entry.num_deaths} times with it, "
                f"{entry.num_deaths_alone} times with it alone: {event.message}"
            )
        self.close(entry, "blamed")

    def check_end(self) -> None:
        """Asserts that everyone who was accepted has ended and that whoever finished has everything."""
        if self.open:
            names = ", ".join(entry.name for entry in self.open.values())
            raise LedgerError(f"{len(self.open)} requests never ended: {names}")
        for entry in self.closed:
            scores = entry.group.prompt_scores
            if entry.outcome == "finished" and scores is not None and not scores.is_complete:
                raise LedgerError(f"{entry.name} finished with {scores.num_scored} log-probabilities of its prompt")
            if entry.outcome != "finished" or entry.arrival.hypotheses is not None:
                continue
            for index, (tokens, sample) in enumerate(zip(entry.tokens, entry.arrival.samples, strict=True)):
                if tokens != sample.token_ids:
                    raise LedgerError(
                        f"{entry.name}.{index} finished with {len(tokens)} tokens of {len(sample.token_ids)}"
                    )
