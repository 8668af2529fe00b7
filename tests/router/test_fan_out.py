"""Readers take their turns in the order in which they came, a few in each round of the event loop."""

from __future__ import annotations

import asyncio

from octavo_router.fan_out import FanOut


def line_up(fan_out: FanOut, num_readers: int) -> list[asyncio.Future[None]]:
    loop = asyncio.get_running_loop()
    turns = [loop.create_future() for _ in range(num_readers)]
    for turn in turns:
        fan_out.join(turn)
    return turns


async def test_readers_take_turns_a_few_in_each_round() -> None:
    turns = line_up(FanOut(readers_per_round=2), 5)
    num_done = []
    for _ in range(4):
        num_done.append(sum(turn.done() for turn in turns))
        await asyncio.sleep(0)
    assert num_done == [0, 2, 4, 5]


async def test_who_comes_later_stands_behind() -> None:
    fan_out = FanOut(readers_per_round=1)
    first, second = line_up(fan_out, 2)
    await asyncio.sleep(0)
    (third,) = line_up(fan_out, 1)
    await asyncio.sleep(0)
    assert (first.done(), second.done(), third.done()) == (True, True, False)
    await third


async def test_a_reader_that_left_takes_no_turn() -> None:
    gone, also_gone, there = line_up(FanOut(readers_per_round=1), 3)
    gone.cancel()
    also_gone.cancel()
    await asyncio.sleep(0)
    assert there.done()


async def test_other_work_comes_in_between() -> None:
    turns = line_up(FanOut(readers_per_round=1), 3)
    seen: list[int] = []

    async def read(number: int) -> None:
        await turns[number]
        seen.append(number)

    async def work() -> None:
        for _ in range(3):
            seen.append(-1)
            await asyncio.sleep(0)

    await asyncio.gather(*(read(number) for number in range(3)), work())
    assert seen.index(2) > [index for index, number in enumerate(seen) if number == -1][1]
    assert [number for number in seen if number >= 0] == [0, 1, 2]


async def test_the_line_forms_again() -> None:
    fan_out = FanOut()
    for _ in range(2):
        await asyncio.gather(*line_up(fan_out, 3))


async def test_who_waits_for_more_gets_in_line_after_twice_the_interval() -> None:
    loop = asyncio.get_running_loop()
    fan_out = FanOut(interval_s=0.01)
    begun = loop.time()
    turns = [loop.create_future() for _ in range(3)]
    for turn in turns:
        fan_out.join_late(turn)
    turns[0].cancel()
    fan_out.join(turns[1])
    await turns[1]
    assert not turns[2].done()
    await turns[2]
    assert loop.time() - begun >= 0.02
    late = loop.create_future()
    fan_out.join_late(late)  # the clock runs again
    await late
