from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from functools import partial

import grpc
import pytest
from tqdm import tqdm

from octavo.async_client import AsyncClient
from octavo.batch import BatchProgress, ChatJob, PromptJob, Result, run_batch
from octavo.errors import InvalidRequestError, OverloadedError
from octavo.types import RequestOutput, Usage
from octavo.v1 import inference_pb2
from tests.clients.fake_router import FakeRouter, abort, echo_in_capitals, prompt_text


def texts(results: list[Result]) -> list[str]:
    return [
        result.outputs[0].text if isinstance(result, RequestOutput) else type(result).__name__ for result in results
    ]


async def test_results_come_in_the_order_of_the_jobs(router: FakeRouter) -> None:
    jobs = [
        PromptJob(f"p{i}", None) if i % 2 else ChatJob([{"role": "user", "content": f"c{i}"}], None) for i in range(20)
    ]
    told: list[int] = []
    async with AsyncClient(router.address) as client:
        results = await run_batch(
            client, jobs, max_concurrency=5, keep_going=False, on_result=lambda index, result: told.append(index)
        )
    assert texts(results) == [f"P{i}" if i % 2 else f"C{i}" for i in range(20)]
    assert sorted(told) == list(range(20))


async def test_no_more_than_so_many_at_a_time(router: FakeRouter) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def counted(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        responses = list(echo_in_capitals(request, context))
        with lock:
            running -= 1
        yield from responses

    router.answer = counted
    async with AsyncClient(router.address) as client:
        await run_batch(client, [PromptJob("x", None)] * 30, max_concurrency=3, keep_going=False)
    assert most <= 3


def refusing_bad(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    if prompt_text(request) == "bad":
        abort(context, InvalidRequestError("bad it is", field="prompt"))
    yield from echo_in_capitals(request, context)


async def test_an_error_takes_its_place(router: FakeRouter) -> None:
    router.answer = refusing_bad
    async with AsyncClient(router.address) as client:
        jobs = [PromptJob(prompt, None) for prompt in ("a", "bad", "b")]
        results = await run_batch(client, jobs, max_concurrency=8, keep_going=True)
    assert texts(results) == ["A", "InvalidRequestError", "B"]


async def test_the_first_error_ends_the_batch_and_names_the_prompt(router: FakeRouter) -> None:
    router.answer = lambda request, context: (
        refusing_bad(request, context) if prompt_text(request) == "bad" else router.stay(request, context)
    )
    async with AsyncClient(router.address) as client:
        with pytest.raises(InvalidRequestError) as error:
            await run_batch(
                client, [PromptJob("slow", None), PromptJob("bad", None)], max_concurrency=8, keep_going=False
            )
        assert error.value.__notes__ == ["in prompt 1 of 2, counted from 0"]
        assert await asyncio.to_thread(router.caller_left.wait, 5)


async def test_a_full_queue_is_tried_again(router: FakeRouter) -> None:
    refusals = iter([True, True, False])

    def full_at_first(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        if next(refusals):
            abort(context, OverloadedError("full", retry_after_s=0.01))
        yield from echo_in_capitals(request, context)

    router.answer = full_at_first
    async with AsyncClient(router.address) as client:
        assert texts(await run_batch(client, [PromptJob("x", None)], max_concurrency=1, keep_going=False)) == ["X"]


async def test_an_empty_batch_has_no_results(router: FakeRouter) -> None:
    async with AsyncClient(router.address) as client:
        assert await run_batch(client, [], max_concurrency=4, keep_going=False) == []


def test_progress_counts_requests_and_tokens() -> None:
    screen = io.StringIO()
    output = RequestOutput("r", None, None, [], finished=True, usage=Usage(3, 5, 0))
    with BatchProgress(2, bar=partial(tqdm, file=screen, mininterval=0)) as progress:
        progress.take(0, output)
        progress.take(1, InvalidRequestError("no"))
    assert "2/2" in screen.getvalue()
    assert "toks/s, output:" in screen.getvalue()


def test_progress_can_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    with BatchProgress(1, enabled=False) as progress:
        progress.take(0, InvalidRequestError("no"))
    assert capsys.readouterr().err == ""
