"""The way of a request's output from the engine to whoever reads it: text is made on one end, deltas are taken on the
other.

What was not read yet is joined: a slow reader gets longer deltas, not more of them. Nothing here decides when a sample
ends, but for stop strings, which only the text can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from octavo.errors import OctavoError
from octavo_router.request import FinishReason, Request, RequestUpdate, SampleDelta, Usage
from octavo_router.results import TokenSampled
from octavo_router.sequence import SequenceGroup
from octavo_router.text_stream import TextStream
from octavo_router.tokenizer import Tokenizer


class Sample:
    """One sample's text and numbers. Times are in the engine's clock."""

    __slots__ = ("cumulative_logprob", "first_token_at", "num_tokens", "text")

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self.first_token_at = 0.0


def samples_of(request: Request, tokenizer: Tokenizer) -> list[Sample]:
    """A request's samples, without tokens yet. Raises InvalidRequestError for stop strings that cannot be looked
    for."""
    text = TextStream(
        tokenizer,
        skip_special_tokens=request.output.skip_special_tokens,
        spaces_between_special_tokens=request.output.spaces_between_special_tokens,
        stop=request.stopping.stop,
        include_stop=request.stopping.include_stop_in_text,
    )
    return [Sample(text.begin_another()) for _ in range(request.sampling.n)]


class Delivery:
    """The engine's end of a stream: takes tokens in, and the end or an error.

    The token that ends a sample, a stop or end-of-sequence id, is in its token ids but adds text only with
    include_stop_in_text, as with stop strings.
    """

    def __init__(self, group: SequenceGroup, samples: list[Sample]) -> None:
        self.group = group
        self.samples = samples
        self.num_open = len(samples)
        self.is_over = False
        self._usage: Usage | None = None
        self._error: OctavoError | None = None
        self._unread: dict[int, SampleDelta] = {}
        self._changed = asyncio.Event()

    @property
    def has_tokens(self) -> bool:
        """Whether any sample has a token yet."""
        return any(sample.num_tokens for sample in self.samples)

    def add(self, event: TokenSampled, now: float) -> FinishReason | None:
        """Takes in a token. Returns why its sample ended with it, which a stop string may have caused, or None."""
        index = event.sequence.sample_index
        sample = self.samples[index]
        if sample.num_tokens == 0:
            sample.first_token_at = now
        sample.num_tokens += 1
        delta = self._unread.get(index)
        if delta is None:
            delta = self._unread[index] = SampleDelta(index)
        delta.token_ids.append(event.token_id)
        if event.logprobs is not None:
            sample.cumulative_logprob += event.logprobs.logprob
            delta.logprobs.append(event.logprobs)
        delta.cumulative_logprob = sample.cumulative_logprob
        delta.finish_reason, delta.matched = self._add_text(sample, event)
        if delta.finish_reason is not None:
            self.num_open -= 1
        self._changed.set()
        return delta.finish_reason

    def _add_text(self, sample: Sample, event: TokenSampled) -> tuple[FinishReason | None, str | int | None]:
        """Adds the token's text; returns why the sample ends with it and what matched."""
        stopping = self.group.request.stopping
        may_stop = sample.num_tokens >= stopping.min_tokens
        matched: str | None = None
        if event.matched is None or stopping.include_stop_in_text:
            matched = sample.text.append(event.token_id, may_stop=may_stop)
        if matched is None and event.finish_reason is not None:
            matched = sample.text.finish(may_stop=may_stop)
        if matched is not None and event.matched is None:
            return FinishReason.STOP, matched
        return event.finish_reason, event.matched

    def end(self) -> None:
        """Every sample has ended; the last update carries the usage."""
        self.is_over = True
        self._usage = Usage(len(self.group.request.prompt_token_ids), self.group.num_output_tokens)
        self._changed.set()

    def fail(self, error: OctavoError) -> None:
        """The request ends with an error, raised behind what can still be read."""
        self.is_over = True
        self._error = error
        self._changed.set()

    async def next_update(self) -> RequestUpdate | None:
        """Everything that came since the last call, as soon as there is anything. None: the request has ended.

        Raises the error that the request ended with.
        """
        while not self._unread and self._usage is None:
            if self._error is not None:
                raise self._error
            if self.is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        deltas, self._unread = list(self._unread.values()), {}
        for delta in deltas:
            delta.text = self.samples[delta.sample_index].text.take()
        usage, self._usage = self._usage, None
        return RequestUpdate(deltas, usage)


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
        update = await self._delivery.next_update()
        if update is None:
            raise StopAsyncIteration
        return update

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
