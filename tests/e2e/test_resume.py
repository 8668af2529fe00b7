"""The Python clients while their router is killed and started again: nothing is lost and nothing comes twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import AsyncClient, Client, RequestOutput, SamplingParams
from octavo.types import OutputDelta
from tests.e2e.harness import Server, running

PROMPT = list(range(5, 45))
# Long enough that the router dies in the middle; the second sample has a text of its own.
PARAMS = SamplingParams(temperature=1.0, seed=11, n=2, max_tokens=240, ignore_eos=True, logprobs=2)


class RouterKiller:
    """Takes a stream's deltas, and kills the router with SIGKILL when they have brought so many tokens."""

    def __init__(self, server: Server, *after: int) -> None:
        self.deltas: list[OutputDelta] = []
        self._server = server
        self._after = list(after)
        self._num_tokens = 0

    def take(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        self._num_tokens += len(delta.token_ids)
        if self._after and self._num_tokens >= self._after[0]:
            del self._after[0]
            os.kill(self._server.pair.pids()["router"], signal.SIGKILL)

    @property
    def is_done(self) -> bool:
        return not self._after


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Any]) -> Iterator[Server]:
    with running(model=str(tiny_models["llama-linear-bias"]), max_model_len=512) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> RequestOutput:
    with Client(server.grpc_address) as client:
        return client.generate({"prompt_token_ids": PROMPT}, PARAMS)


def check(output: RequestOutput, killer: RouterKiller, undisturbed: RequestOutput) -> None:
    """What was put together, and what was handed out piece by piece, is what an undisturbed request gave."""
    assert killer.is_done
    assert output.outputs == undisturbed.outputs
    assert output.usage is not None
    assert undisturbed.usage is not None
    assert output.usage.completion_tokens == undisturbed.usage.completion_tokens == 480
    assert output.finished
    for sample in undisturbed.outputs:
        own = [delta for delta in killer.deltas if delta.index == sample.index]
        assert [token_id for delta in own for token_id in delta.token_ids] == sample.token_ids
        assert "".join(delta.text for delta in own) == sample.text
        assert [entry for delta in own for entry in delta.logprobs or ()] == sample.logprobs
        assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]


def test_a_stream_outlives_its_router_twice(server: Server, undisturbed: RequestOutput) -> None:
    killer = RouterKiller(server, 60, 300)
    with Client(server.grpc_address) as client, client.stream({"prompt_token_ids": PROMPT}, PARAMS) as stream:
        for delta in stream:
            killer.take(delta)
    check(stream.output, killer, undisturbed)


async def test_streams_and_whole_answers_outlive_their_router(server: Server, undisturbed: RequestOutput) -> None:
    killer = RouterKiller(server, 60)
    async with AsyncClient(server.grpc_address) as client:
        whole = [asyncio.create_task(client.generate({"prompt_token_ids": PROMPT}, PARAMS)) for _ in range(3)]
        async with client.stream({"prompt_token_ids": PROMPT}, PARAMS) as stream:
            async for delta in stream:
                killer.take(delta)
        check(stream.output, killer, undisturbed)
        for output in await asyncio.gather(*whole):
            assert output.outputs == undisturbed.outputs


def test_a_stop_string_is_found_across_the_cut(server: Server, undisturbed: RequestOutput) -> None:
    text = undisturbed.outputs[0].text
    stop = text[len(text) // 2 :][:24]
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=240, ignore_eos=True, stop=stop)
    with Client(server.grpc_address) as client:
        expected = client.generate({"prompt_token_ids": PROMPT}, params).outputs[0]
        assert expected.stop_reason == stop
        # As near to the stop string's end as deltas allow.
        killer = RouterKiller(server, len(expected.token_ids) - 12)
        with client.stream({"prompt_token_ids": PROMPT}, params) as stream:
            for delta in stream:
                killer.take(delta)
    assert killer.is_done
    assert stream.output.outputs[0] == expected
    server.wait_idle()
