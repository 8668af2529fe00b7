"""A stream's two ends by themselves: what is joined, what comes last, and what a lost reader causes."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from typing import Any

import pytest

from octavo.errors import GenerationError
from octavo_router.beam_search import Hypothesis
from octavo_router.fan_out import FanOut
from octavo_router.request import Beams, FinishReason, Output, TokenLogprobs, Usage
from octavo_router.results import TokenSampled
from octavo_router.sequence import SequenceGroup
from octavo_router.stream import Delivery, RequestStream
from tests.router.fake_client import letter_tokenizer
from tests.router.fake_worker import EOS_TOKEN_ID
from tests.router.harness import EOS, make_request

C, D, E = 2, 3, 4


def make_delivery(n: int = 1, fan_out: FanOut | None = None, **fields: Any) -> Delivery:
    request = make_request(num_prompt=7, max_tokens=10, n=n, **fields)
    group = SequenceGroup(request, arrival=1, first_sequence_id=1, eos_token_ids=EOS, now=0.0)
    return Delivery(group, letter_tokenizer(), fan_out or FanOut())


def give(
    delivery: Delivery,
    token_id: int,
    index: int = 0,
    reason: FinishReason | None = None,
    logprob: float | None = None,
) -> None:
    sequence = delivery.group.sequences[index]
    sequence.output_token_ids.append(token_id)
    logprobs = None if logprob is None else TokenLogprobs(token_id, logprob)
    delivery.add(TokenSampled(sequence, token_id, logprobs, reason), 0.0)


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
    texts = [sample._text for sample in make_delivery(n=3, stop=("never", "ever")).samples]
    assert len({id(text._plain._goto) for text in texts if text._plain}) == 1
    assert len({id(text) for text in texts}) == 3


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


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_the_best_samples_come_in_one_update_when_all_have_ended(logprobs: int | None) -> None:
    delivery = make_delivery(n=2, best_of=4, logprobs=logprobs)
    stream = RequestStream(delivery, lambda delivery: None)
    reading = asyncio.ensure_future(anext(stream))
    # In the mean -2, -0.5, -0.75 and -0.5: the sum would choose otherwise, and of equal ones the first goes first.
    for index, logprob_of_each in enumerate(([-2.0], [-0.5, -0.5], [-0.75], [-0.25, -0.75])):
        for position, logprob in enumerate(logprob_of_each):
            last = position == len(logprob_of_each) - 1
            give(delivery, C + index, index, FinishReason.LENGTH if last else None, logprob)
        await asyncio.sleep(0)
        assert not reading.done()
    delivery.end()
    update = await reading
    assert [(delta.sample_index, delta.text, delta.token_ids) for delta in update.deltas] == [
        (0, "DD", [3, 3]),
        (1, "FF", [5, 5]),
    ]
    assert [delta.cumulative_logprob for delta in update.deltas] == [-1.0, -1.0]
    assert [len(delta.logprobs) for delta in update.deltas] == ([0, 0] if logprobs is None else [2, 2])
    assert update.usage == Usage(prompt_tokens=7, completion_tokens=6)
    assert [update async for update in stream] == []


async def test_of_samples_to_choose_from_nothing_comes_before_an_error() -> None:
    delivery = make_delivery(best_of=2)
    stream = RequestStream(delivery, lambda delivery: None)
    give(delivery, C, logprob=-1.0)
    delivery.fail(GenerationError("it failed"))
    with pytest.raises(GenerationError):
        await anext(stream)


async def test_beams_come_in_one_update() -> None:
    delivery = make_delivery(n=2, beams=Beams(3), ignore_eos=False)
    stream = RequestStream(delivery, lambda delivery: None)
    delivery.add_beams(
        [
            Hypothesis((C, D, EOS_TOKEN_ID), -1.5, -0.5, FinishReason.STOP),
            Hypothesis((E, D, C, C), -4.0, -1.0, FinishReason.LENGTH),
            Hypothesis((E, E), -8.0, -4.0, FinishReason.LENGTH),
        ]
    )
    delivery.end()
    update = await anext(stream)
    first, second = update.deltas
    assert (first.text, first.token_ids, first.cumulative_logprob) == ("CD", [C, D, EOS_TOKEN_ID], -1.5)
    assert (first.finish_reason, first.matched) == (FinishReason.STOP, EOS_TOKEN_ID)
    assert (second.sample_index, second.text, second.cumulative_logprob) == (1, "EDCC", -4.0)
    assert (second.finish_reason, second.matched) == (FinishReason.LENGTH, None)
    assert update.usage == Usage(prompt_tokens=7, completion_tokens=7)


async def test_usage_tells_what_was_cached() -> None:
    delivery = make_delivery()
    delivery.group.num_cached_tokens = 4
    give(delivery, C, reason=FinishReason.LENGTH)
    delivery.end()
    assert (await anext(RequestStream(delivery, lambda delivery: None))).usage == Usage(7, 1, 4)


async def test_a_lost_reader_cancels_and_a_finished_one_does_not() -> None:
    cancelled: list[Delivery] = []
    lost, finished = make_delivery(), make_delivery()
    streams = [RequestStream(delivery, cancelled.append) for delivery in (lost, finished)]
    finished.end()
    del streams
    gc.collect()
    await asyncio.sleep(0.01)
    assert cancelled == [lost]


async def test_what_comes_while_a_reader_waits_for_its_turn_is_joined() -> None:
    fan_out = FanOut(readers_per_round=1)
    deliveries = [make_delivery(fan_out=fan_out) for _ in range(3)]
    reading = [asyncio.create_task(delivery.next_update()) for delivery in deliveries]
    await asyncio.sleep(0)
    for token_id in (C, D, E):
        for delivery in deliveries:
            give(delivery, token_id)
        await asyncio.sleep(0)
    updates = await asyncio.gather(*reading)
    assert [update.deltas[0].text for update in updates if update is not None] == ["CD", "CDE", "CDE"]


async def test_who_wants_no_stream_gets_one_update() -> None:
    request = dataclasses.replace(make_request(num_prompt=7, max_tokens=200), output=Output(final_only=True))
    group = SequenceGroup(request, arrival=1, first_sequence_id=1, eos_token_ids=EOS, now=0.0)
    delivery = Delivery(group, letter_tokenizer(), FanOut())
    stream = RequestStream(delivery, lambda delivery: None)
    reading = asyncio.create_task(anext(stream))
    for _ in range(199):
        give(delivery, C)
    await asyncio.sleep(0)
    assert not reading.done()
    give(delivery, D, reason=FinishReason.LENGTH)
    delivery.end()
    update = await reading
    assert (update.deltas[0].text, update.usage) == ("C" * 199 + "D", Usage(7, 200))
    assert [update async for update in stream] == []


async def test_a_reader_with_more_to_read_stands_in_line_again() -> None:
    fan_out = FanOut(readers_per_round=1)
    greedy, patient = make_delivery(fan_out=fan_out), make_delivery(fan_out=fan_out)
    order: list[str] = []

    async def read(delivery: Delivery, name: str) -> None:
        for _ in range(2):
            await delivery.next_update()
            order.append(name)
            give(delivery, D)

    for delivery in (greedy, patient):
        give(delivery, C)
    await asyncio.gather(read(greedy, "greedy"), read(patient, "patient"))
    assert order == ["greedy", "patient", "greedy", "patient"]


async def rounds(count: int = 10) -> None:
    """Lets whatever is ready go on, for more rounds of the event loop than a reader needs, however slow they are."""
    for _ in range(count):
        await asyncio.sleep(0)


async def read_all(delivery: Delivery, texts: list[str]) -> None:
    while (update := await delivery.next_update()) is not None:
        texts.append("".join(delta.text for delta in update.deltas))


async def test_tokens_join_within_an_interval_but_the_first_and_the_end_never_wait() -> None:
    delivery = make_delivery(fan_out=FanOut(interval_s=60))
    texts: list[str] = []
    reading = asyncio.create_task(read_all(delivery, texts))
    for token_id in (C, D, E, C):
        give(delivery, token_id)
        await rounds()
    assert texts == ["C"]
    give(delivery, D, reason=FinishReason.LENGTH)
    delivery.end()
    await reading
    assert texts == ["C", "DECD"]


async def test_an_error_does_not_wait() -> None:
    delivery = make_delivery(fan_out=FanOut(interval_s=60))
    texts: list[str] = []
    reading = asyncio.create_task(read_all(delivery, texts))
    for token_id in (C, D):
        give(delivery, token_id)
        await rounds()
    delivery.fail(GenerationError("it failed"))
    with pytest.raises(GenerationError, match="it failed"):
        await reading
    assert texts == ["C", "D"]


async def test_a_token_behind_which_none_comes_waits_for_twice_the_interval_at_most() -> None:
    delivery = make_delivery(fan_out=FanOut(interval_s=0.01))
    texts: list[str] = []
    for token_id in (C, D):
        reading = asyncio.create_task(delivery.next_update())
        await asyncio.sleep(0)
        give(delivery, token_id)
        update = await asyncio.wait_for(reading, 10)
        assert update is not None
        texts.append(update.deltas[0].text)
    assert texts == ["C", "D"]


async def test_what_came_while_the_reader_was_away_waits_too() -> None:
    """A reader that comes back within the interval is not served before it is over."""
    delivery = make_delivery(fan_out=FanOut(interval_s=0.5))
    give(delivery, C)
    first = await delivery.next_update()
    give(delivery, D)
    reading = asyncio.create_task(delivery.next_update())
    await rounds()
    give(delivery, E)
    assert not reading.done()
    update = await reading
    assert first is not None
    assert update is not None
    assert [delta.text for delta in (*first.deltas, *update.deltas)] == ["C", "DE"]
