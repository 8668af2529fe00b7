from __future__ import annotations

import asyncio

import pytest

from octavo import AsyncClient
from octavo.errors import DeadlineError, InvalidRequestError, RequestCancelledError, UnavailableError
from octavo.types import SamplingParams
from tests.clients.fake_router import FakeRouter, cut_off, echo_in_capitals, failing_with, in_turn


async def test_generate_and_chat(router: FakeRouter) -> None:
    async with AsyncClient(router.address) as client:
        assert (await client.generate("hi", SamplingParams(max_tokens=1))).outputs[0].text == "H"
        assert (await client.chat([{"role": "user", "content": "ho"}])).outputs[0].text == "HO"


async def test_streams(router: FakeRouter) -> None:
    async with AsyncClient(router.address) as client:
        async with client.stream("abc") as stream:
            assert [delta.text async for delta in stream] == ["A", "B", "C", ""]
        assert stream.output.finished
        assert [d.text async for d in client.stream_chat([{"role": "user", "content": "x"}])] == ["X", ""]


async def test_many_at_once(router: FakeRouter) -> None:
    async with AsyncClient(router.address) as client:
        outputs = await asyncio.gather(*(client.generate(f"p{i}") for i in range(40)))
    assert [output.outputs[0].text for output in outputs] == [f"P{i}" for i in range(40)]


async def test_other_calls(router: FakeRouter) -> None:
    async with AsyncClient(router.address) as client:
        assert await client.tokenize("hi") == [104, 105]
        assert await client.detokenize([104, 105]) == "hi"
        assert [model.name for model in await client.list_models()] == ["fake"]
        assert await client.health()
        assert (await client.state()).version == "1.2.3"
        assert await client.drain() == 3
        assert await client.flush_prefix_cache() == 5


async def test_errors_are_typed(router: FakeRouter) -> None:
    router.answer = failing_with(InvalidRequestError("no", field="prompt"))
    async with AsyncClient(router.address) as client:
        with pytest.raises(InvalidRequestError) as error:
            await client.generate("x")
        assert error.value.field == "prompt"
        router.answer = router.stay
        with pytest.raises(DeadlineError):
            await client.generate("x", timeout=0.1)


async def test_nobody_there() -> None:
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9"):
            await client.generate("x")


async def test_closing_a_stream_cancels_the_request(router: FakeRouter) -> None:
    router.answer = router.stay
    async with AsyncClient(router.address) as client:
        stream = client.stream("x")
        assert (await anext(stream)).text == "A"
        await stream.aclose()
        assert await asyncio.to_thread(router.caller_left.wait, 5)
        assert [delta async for delta in stream] == []


async def test_closing_from_another_task_ends_the_wait(router: FakeRouter) -> None:
    router.answer = router.stay
    async with AsyncClient(router.address) as client:
        stream = client.stream("x")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.05, stream.close)
        assert [delta async for delta in stream] == []


async def test_cancelling_the_task_cancels_the_request(router: FakeRouter) -> None:
    router.answer = router.stay
    async with AsyncClient(router.address) as client:
        started = asyncio.Event()

        async def follow() -> None:
            async for _ in client.stream("x"):
                started.set()

        task = asyncio.create_task(follow())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.caller_left.wait, 5)


async def test_closed_client_says_so(router: FakeRouter) -> None:
    client = AsyncClient(router.address)
    await client.close()
    with pytest.raises(RequestCancelledError, match="closed"):
        await client.generate("x")


async def test_streams_go_on_where_their_server_went_away(router: FakeRouter) -> None:
    router.answer = in_turn(cut_off(3), cut_off(2), echo_in_capitals)
    async with AsyncClient(router.address) as client, client.stream("abcd") as stream:
        assert [delta.text async for delta in stream] == ["A", "B", "C", "D", ""]
    assert bytes(router.requests[2].resume.samples[0].token_ids) == b"ABC"
    router.answer = in_turn(cut_off(0), echo_in_capitals)
    async with AsyncClient(router.address) as client:
        assert (await client.generate("abc")).outputs[0].text == "ABC"


async def test_without_resuming_a_loss_is_an_error_at_once(router: FakeRouter) -> None:
    router.answer = in_turn(cut_off(2))
    async with AsyncClient(router.address, resume_timeout_s=0) as client, client.stream("ab") as stream:
        assert (await anext(stream)).text == "A"
        with pytest.raises(UnavailableError):
            await anext(stream)


async def test_closing_or_cancelling_ends_the_wait_for_a_server() -> None:
    async with AsyncClient("127.0.0.1:9", wait_for_server=True) as client:
        stream = client.stream("x")
        asyncio.get_running_loop().call_later(0.05, stream.close)
        assert [delta async for delta in stream] == []
        task = asyncio.create_task(client.generate("x"))
        asyncio.get_running_loop().call_later(0.05, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_timeout_holds_over_all_tries() -> None:
    async with AsyncClient("127.0.0.1:9", wait_for_server=True) as client:
        with pytest.raises(DeadlineError):
            await client.generate("x", timeout=0.2)
