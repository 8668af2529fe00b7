"""A stream's two ends by themselves: what is joined, what comes last, and what a lost reader causes."""

from __future__ import annotations

import asyncio
import gc

import pytest

from octavo.errors import GenerationError
from octavo_router.request import FinishReason, Usage
from octavo_router.results import TokenSampled
from octavo_router.sequence import SequenceGroup
from octavo_router.stream import Delivery, RequestStream, samples_of
from tests.router.fake_client import letter_tokenizer
from tests.router.harness import EOS, make_request

C, D, E = 2, 3, 4


def make_delivery(n: int = 1) -> Delivery:
    request = make_request(num_prompt=7, max_tokens=10, n=n)
    group = SequenceGroup(request, arrival=1, first_sequence_id=1, eos_token_ids=EOS, now=0.0)
    return Delivery(group, samples_of(request, letter_tokenizer()))


def give(delivery: Delivery, token_id: int, index: int = 0, reason: FinishReason | None = None) -> None:
    sequence = delivery.group.sequences[index]
    sequence.output_token_ids.append(token_id)
    delivery.add(TokenSampled(sequence, token_id, finish_reason=reason), 0.0)


async def test_deltas_are_joined_until_they_are_read() -> None:
    delivery = make_delivery()
    stream = RequestStream(delivery, lambda delivery: None)
    give(delivery, C)
    first = await anext(stream)
    give(delivery, D)
    give(delivery, E, reason=FinishReason.LENGTH)
    delivery.end()
    last = await anext(stream)
    assert [(delta.token_ids, delta.text) for delta in first.deltas + last.deltas] == [([C], "C"), ([D, E], "DE")]
    assert (first.usage, last.usage) == (None, Usage(7, 3))
    assert (first.deltas[0].finish_reason, last.deltas[0].finish_reason) == (None, FinishReason.LENGTH)
    assert [update async for update in stream] == []


def test_samples_share_what_is_made_of_their_stop_strings() -> None:
    samples = samples_of(make_request(n=3, stop=("never", "ever")), letter_tokenizer())
    assert len({id(sample.text._plain._goto) for sample in samples if sample.text._plain}) == 1
    assert len({id(sample.text) for sample in samples}) == 3


async def test_an_update_has_a_delta_for_each_sample_that_gained_something() -> None:
    delivery = make_delivery(n=3)
    stream = RequestStream(delivery, lambda delivery: None)
    give(delivery, C, index=2)
    give(delivery, D, index=0)
    give(delivery, E, index=2)
    update = await anext(stream)
    assert {delta.sample_index: delta.text for delta in update.deltas} == {0: "D", 2: "CE"}
    assert delivery.num_open == 3


async def test_an_error_comes_behind_what_was_made_before() -> None:
    delivery = make_delivery()
    stream = RequestStream(delivery, lambda delivery: None)
    give(delivery, C)
    delivery.fail(GenerationError("it failed"))
    assert (await anext(stream)).deltas[0].text == "C"
    for _ in range(2):
        with pytest.raises(GenerationError, match="it failed"):
            await anext(stream)


async def test_a_reader_is_woken() -> None:
    delivery = make_delivery()
    stream = RequestStream(delivery, lambda delivery: None)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    give(delivery, C)
    assert (await waiting).deltas[0].token_ids == [C]


async def test_a_lost_reader_cancels_and_a_finished_one_does_not() -> None:
    cancelled: list[Delivery] = []
    lost, finished = make_delivery(), make_delivery()
    streams = [RequestStream(delivery, cancelled.append) for delivery in (lost, finished)]
    finished.end()
    del streams
    gc.collect()
    await asyncio.sleep(0.01)
    assert cancelled == [lost]
