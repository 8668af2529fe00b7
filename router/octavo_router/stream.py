"""The way of a request's output from the engine to whoever reads it: tokens go in on one end, deltas are taken on the
other.

What was not read yet is joined: a slow reader gets longer deltas, not more of them, and so does every reader while the
event loop is behind, or tokens come faster than messages are worth sending (`fan_out.py`). The first token and the end
never wait. Where only the end tells what is returned (best_of above n, beams), or the caller
asks for no more, everything waits for it and comes in one update. What a sample's text is, and where a stop string ends
it, is `sample.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from octavo.errors import InternalError, OctavoError
from octavo_router.beam_search import Hypothesis
from octavo_router.fan_out import FanOut
from octavo_router.request import FinishReason, RequestUpdate, SampleDelta, TokenLogprobs, Usage
from octavo_router.results import TokenSampled
from octavo_router.sample import End, Sample, blank_text
from octavo_router.sequence import SequenceGroup
from octavo_router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Delivery:
    """The engine's end of a stream: takes tokens in, and the end or an error.

    samples: by sample index; of beams none until they have ended. The token that ends a sample, a stop or
    end-of-sequence id, is in its token ids but adds text only with include_stop_in_text, as with stop strings.
    """

    def __init__(self, group: SequenceGroup, tokenizer: Tokenizer, fan_out: FanOut) -> None:
        """fan_out: where the reader waits for its turn.

        Raises ResumeMismatchError where the caller holds what the request cannot have given, and InvalidRequestError
        for stop strings that cannot be looked for.
        """
        request = group.request
        self.group = group
        self.is_over = False
        self.has_new_tokens = False
        self._blank_text = blank_text(request, tokenizer)
        # They come for the ranking as well, asked for or not.
        self._shows_logprobs = request.output.logprobs is not None
        is_known_early = request.sampling.beams is None and request.sampling.best_of <= request.sampling.n
        self._is_streamed = is_known_early and not request.output.final_only
        self._usage: Usage | None = None
        self._error: OctavoError | None = None
        self._unread: dict[int, SampleDelta] = {}
        self._fan_out = fan_out
        self._turn: asyncio.Future[None] | None = None  # the reader's, while it waits for something to read
        self._due_at = 0.0  # by the event loop's clock: what is not urgent waits until then
        num_samples = request.sampling.n if group.is_prompt_only else len(group.sequences)
        self.samples = [self._new_sample() for _ in range(num_samples)] if request.sampling.beams is None else []
        for held in request.resumed:
            sample = self.samples[held.sample_index]
            if sample.resume(held, group.stop_ids):
                _tell_end(self._delta(held.sample_index), sample)

    @property
    def num_open(self) -> int:
        """Samples that have not ended."""
        return sum(sample.end is None for sample in self.samples)

    def add(self, event: TokenSampled, now: float) -> FinishReason | None:
        """Takes in a token. Returns why its sample ended with it, which a stop string may have caused, or None."""
        index = event.sequence.sample_index
        sample = self.samples[index]
        is_first_unread = not self._unread
        if sample.num_new_tokens == 0:
            sample.first_token_at = now
        self.has_new_tokens = True
        delta = self._delta(index)
        delta.token_ids.append(event.token_id)
        if event.logprobs is not None:
            sample.cumulative_logprob += event.logprobs.logprob
            if self._shows_logprobs:
                delta.logprobs.append(event.logprobs)
        end = None if event.finish_reason is None else End(event.finish_reason, event.matched)
        sample.append(event.token_id, end)
        if sample.end is not None:
            _tell_end(delta, sample)
            self._due_at = 0.0
        if self._is_streamed:
            if self._is_due:
                self._tell()
            elif is_first_unread and self._turn is not None:
                self._fan_out.join_late(self._turn)
        return delta.finish_reason

    def add_prompt(self, *, is_end: bool) -> None:
        """The prompt's log-probabilities are there. is_end: the request is for nothing more, so all samples end."""
        if is_end:
            for index, sample in enumerate(self.samples):
                sample.end = End(FinishReason.LENGTH)
                _tell_end(self._delta(index), sample)
        self._tell()

    def add_beams(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Takes in the beams that a search ended with, best first; the first n come back."""
        request = self.group.request
        self.has_new_tokens = True
        for index, hypothesis in enumerate(hypotheses[: request.sampling.n]):
            sample = self._new_sample()
            sample.cumulative_logprob = hypothesis.cumulative_logprob
            *token_ids, last = hypothesis.token_ids
            for token_id in token_ids:
                sample.append(token_id, None)
            is_stopped = hypothesis.finish_reason is FinishReason.STOP
            sample.append(last, End(hypothesis.finish_reason, last if is_stopped else None))
            self.samples.append(sample)
            delta = self._delta(index)
            delta.token_ids.extend(hypothesis.token_ids)
            _tell_end(delta, sample)

    def end(self) -> None:
        """Every sample has ended; the last update carries the usage."""
        group = self.group
        if group.request.sampling.beams is not None:
            num_completion = sum(sample.num_tokens for sample in self.samples)
        else:
            num_completion = group.num_output_tokens
        if group.request.sampling.best_of > group.request.sampling.n:
            self._keep_best(group.request.sampling.n)
        self.is_over = True
        self._usage = Usage(len(group.request.prompt_token_ids), num_completion, group.num_cached_tokens)
        self._tell()

    def _keep_best(self, n: int) -> None:
        """Leaves the n samples with the highest mean log-probability, numbered from the best; of equal ones the first
        in the old order.
        """
        best = sorted(range(len(self.samples)), key=lambda index: -self.samples[index].mean_logprob)[:n]
        self.samples = [self.samples[index] for index in best]
        self._unread = {rank: self._unread[index] for rank, index in enumerate(best)}
        for rank, delta in self._unread.items():
            delta.sample_index = rank

    def fail(self, error: OctavoError) -> None:
        """The request ends with an error, raised behind what can still be read."""
        self.is_over = True
        self._error = error
        self._tell()

    async def prompt_logprobs(self) -> Iterator[TokenLogprobs]:
        """The log-probabilities of the prompt's tokens from the second on, once all are there; none where they are not
        asked for. Raises the error that the request ended with before.
        """
        scores = self.group.prompt_scores
        if scores is None:
            return iter(())
        while not scores.is_complete:
            if self._error is not None:
                raise self._error
            await self._news()
        return scores.entries(self.group.request.prompt_token_ids)

    async def next_update(self) -> RequestUpdate | None:
        """Everything that came since the last call, as soon as there is anything. None: the request has ended.

        Raises the error that the request ended with.
        """
        if self._has_update:
            await self._next_turn()
        while not self._has_update:
            if self._error is not None:
                raise self._error
            if self.is_over:
                return None
            await self._news()
        if self._fan_out.interval_s:
            self._due_at = asyncio.get_running_loop().time() + self._fan_out.interval_s
        deltas, self._unread = list(self._unread.values()), {}
        for delta in deltas:
            sample = self.samples[delta.sample_index]
            delta.text, delta.cumulative_logprob = sample.take_text(), sample.cumulative_logprob
        usage, self._usage = self._usage, None
        return RequestUpdate(deltas, usage)

    @property
    def _has_update(self) -> bool:
        return self._usage is not None or (self._is_streamed and bool(self._unread))

    @property
    def _is_due(self) -> bool:
        """Whether what there is to read is not to wait for more."""
        return self._due_at == 0.0 or self.is_over or asyncio.get_running_loop().time() >= self._due_at

    def _tell(self) -> None:
        """There is something to read: the reader, if it waits for it, gets in line."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._fan_out.join(turn)

    async def _news(self) -> None:
        """Waits until there is something to read, and then for the reader's turn."""
        self._turn = asyncio.get_running_loop().create_future()
        await self._turn

    async def _next_turn(self) -> None:
        """Waits for the reader's turn where there is something to read already."""
        turn = asyncio.get_running_loop().create_future()
        if self._is_due:
            self._fan_out.join(turn)
        else:
            self._turn = turn
            self._fan_out.join_late(turn)
        await turn

    def held_text(self, index: int) -> str:
        """What the caller of a resumed request held of a sample's text on arrival; empty where it held nothing."""
        return self.samples[index].held_text

    def _new_sample(self) -> Sample:
        return Sample(self.group.request, self._blank_text.begin_another())

    def _delta(self, index: int) -> SampleDelta:
        """What the reader has not taken of a sample."""
        delta = self._unread.get(index)
        if delta is None:
            delta = self._unread[index] = SampleDelta(index)
        return delta


def _tell_end(delta: SampleDelta, sample: Sample) -> None:
    if sample.end is not None:
        delta.finish_reason, delta.matched = sample.end.reason, sample.end.matched


class RequestStream:
    """The reader's end: an asynchronous iterator of updates. Cancelling it, or losing it, releases the request."""

    def __init__(self, delivery: Delivery, cancel: Callable[[Delivery], None]) -> None:
        self._delivery = delivery
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestUpdate:
        """The next update, with everything since the last. Raises what the request failed with, after the last
        update."""
        try:
            update = await self._delivery.next_update()
        except OctavoError:
            raise
        except Exception as error:  # in making the text
            self.cancel()
            request_id = self._delivery.group.request.request_id
            logger.error("request %s failed on its text", request_id, exc_info=error)
            raise InternalError("the request failed in the router; this is a bug, see the router's log") from None
        if update is None:
            raise StopAsyncIteration
        return update

    async def prompt_logprobs(self) -> Iterator[TokenLogprobs]:
        """As Delivery.prompt_logprobs. To be awaited before the first update, if at all."""
        return await self._delivery.prompt_logprobs()

    def held_text(self, index: int) -> str:
        """As Delivery.held_text."""
        return self._delivery.held_text(index)

    def cancel(self) -> None:
        """Ends the request if it has not ended; its memory is released with the next plan sent. Idempotent."""
        self._cancel(self._delivery)

    async def aclose(self) -> None:
        """As cancel, for contextlib.aclosing."""
        self.cancel()

    def __del__(self) -> None:
        # Collection may happen in any thread, and after the loop has gone.
        if not self._delivery.is_over and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, self._delivery)
