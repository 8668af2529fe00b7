from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncClient, AsyncLLMEngine, Client, EngineArgs, RequestOutput, RequestOutputKind, SamplingParams
from octavo.async_client import AsyncGenerationStream
from octavo.errors import InvalidRequestError, RequestCancelledError, StartError
from octavo.process import ProcessPair
from octavo.program import ProgramSpec
from octavo.types import Prompt
from tests.clients.conftest import PROGRAMS, make_findable

LONG = "abc" * 2000
ALL = SamplingParams(max_tokens=None)


@pytest.fixture
def stand_ins(programs: tuple[ProgramSpec, ProgramSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines start the stand-ins instead of the real programs."""
    monkeypatch.setattr("octavo.own_pair.ProcessPair", functools.partial(ProcessPair, programs=programs))


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLMEngine]:
    """One engine for all tests that leave it as it was, each in a loop of its own."""
    with pytest.MonkeyPatch.context() as patch:
        make_findable(patch)
        patch.setattr("octavo.own_pair.ProcessPair", functools.partial(ProcessPair, programs=PROGRAMS))
        engine = AsyncLLMEngine.from_engine_args(EngineArgs("m"))
    yield engine
    engine.shutdown()


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


async def test_each_output_holds_everything_so_far(engine: AsyncLLMEngine) -> None:
    outputs = await collect(engine.generate("hey", ALL, "one"))
    assert texts(outputs) == ["H", "HE", "HEY", "HEY"]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert outputs[-1].request_id == "one"
    assert outputs[-1].prompt == "hey"
    assert outputs[-1].prompt_token_ids == [104, 101, 121]
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].token_ids == [72, 69, 89]


async def test_outputs_may_hold_what_is_new_or_come_once(engine: AsyncLLMEngine) -> None:
    new = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA)
    outputs = await collect(engine.generate("hey", new, "one"))
    assert texts(outputs) == ["H", "E", "Y", ""]
    assert outputs[-1].finished
    once = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = await collect(engine.generate("hey", once, "one"))
    assert (output.outputs[0].text, output.finished) == ("HEY", True)


async def test_samples_that_grow_together_come_together(engine: AsyncLLMEngine) -> None:
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        outputs = await collect(engine.generate("hey", SamplingParams(n=2, output_kind=kind), "one"))
        assert [[sample.index for sample in output.outputs] for output in outputs] == [[0, 1]] * 4


async def test_prompts_as_token_ids_conversations_and_defaults(engine: AsyncLLMEngine) -> None:
    outputs = await collect(engine.generate({"prompt_token_ids": [104, 105]}, ALL, request_id="one"))
    assert texts(outputs)[-1] == "HI"
    outputs = await collect(engine.chat([{"role": "user", "content": "hey"}], ALL, chat_template=None))
    assert texts(outputs)[-1] == "HEY"
    assert texts(await collect(engine.generate("a" * 20)))[-1] == "A" * 16


async def test_an_aborted_request_ends_with_what_it_had(engine: AsyncLLMEngine) -> None:
    outputs = []
    async for output in engine.generate(LONG, ALL, "one"):
        outputs.append(output)
        await engine.abort(["one", "unknown"])
        await engine.abort("one")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].outputs[0].text == outputs[-2].outputs[0].text
    assert len(outputs[-1].outputs[0].text) < len(LONG)
    await engine.abort("one")  # long gone


async def test_a_request_id_is_taken_while_its_request_runs(engine: AsyncLLMEngine) -> None:
    outputs = engine.generate(LONG, ALL, "one")
    await anext(outputs)
    with pytest.raises(InvalidRequestError, match="request_id 'one' is running"):
        await collect(engine.generate("hey", ALL, "one"))
    await outputs.aclose()
    assert texts(await collect(engine.generate("hey", ALL, "one")))[-1] == "HEY"


async def test_a_cancelled_task_frees_its_request_id(engine: AsyncLLMEngine) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in engine.generate(LONG * 10, ALL, "one"):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert texts(await collect(engine.generate("hey", ALL, "one")))[-1] == "HEY"


async def test_mistakes_are_told_at_the_first_output(engine: AsyncLLMEngine) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'lora_request'"):
        await collect(engine.generate("hey", ALL, "one", lora_request=1))
    with pytest.raises(InvalidRequestError, match="max_tokens is -1"):
        await collect(engine.generate("hey", SamplingParams(max_tokens=-1), "one"))
    assert texts(await collect(engine.generate("hey", ALL, "one")))[-1] == "HEY"


def test_one_engine_serves_one_loop_after_another(engine: AsyncLLMEngine) -> None:
    for _ in range(2):
        assert texts(asyncio.run(collect(engine.generate("hey", ALL, "one"))))[-1] == "HEY"


async def test_facts_of_the_model_and_of_the_engine(engine: AsyncLLMEngine, capsys: pytest.CaptureFixture[str]) -> None:
    config = await engine.get_model_config()
    assert (config.model, config.max_model_len) == ("fake", 100)
    await engine.check_health()
    assert (await engine.get_state()).version == "1.2.3"
    await engine.do_log_stats()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Avg prompt throughput: 0.0 tokens/s, ")
    assert engine.is_running
    assert not engine.errored
    with Client(engine.address, api_key="") as client:
        assert await asyncio.to_thread(client.health)


async def test_shutting_down_ends_what_runs_and_says_so_to_what_comes(stand_ins: None) -> None:
    engine = AsyncLLMEngine.from_engine_args(EngineArgs("m"))
    outputs = engine.generate(LONG * 10, ALL, "one")
    await anext(outputs)
    engine.shutdown()  # blocks this loop: the stream cannot end by itself meanwhile
    engine.shutdown()
    with pytest.raises(RequestCancelledError, match="shut down before the request ended"):
        await collect(outputs)
    assert not engine.is_running
    with pytest.raises(RequestCancelledError, match="this engine is shut down"):
        await collect(engine.generate("hey", ALL, "two"))


async def test_a_context_manager_shuts_down(stand_ins: None) -> None:
    async with AsyncLLMEngine.from_engine_args(EngineArgs("m")) as engine:
        assert texts(await collect(engine.generate("hey", ALL)))[-1] == "HEY"
    assert not engine.is_running


def test_a_dropped_engine_stops_its_programs(stand_ins: None) -> None:
    engine = AsyncLLMEngine.from_engine_args(EngineArgs("m"))
    folder = Path(engine.address.removeprefix("unix:")).parent
    assert texts(asyncio.run(collect(engine.generate("hey", ALL))))[-1] == "HEY"
    del engine
    gc.collect()
    assert not folder.exists()


async def test_requests_end_when_the_engine_dies_for_good(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "die"
    marker.touch()
    monkeypatch.setenv("FAKE_ROUTER", f"dies:{marker}")
    engine = AsyncLLMEngine.from_engine_args(EngineArgs("m"))
    monkeypatch.setenv("FAKE_ROUTER", "exit")
    with pytest.raises(StartError, match="no address"):
        await collect(engine.generate("hey", ALL))
    assert engine.errored
    assert isinstance(engine.dead_error, StartError)
    with pytest.raises(StartError, match="no address"):
        await engine.get_model_config()
    engine.shutdown()


async def test_a_router_that_dies_is_outlived(stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marker = tmp_path / "die"
    marker.touch()
    monkeypatch.setenv("FAKE_ROUTER", f"dies:{marker}")
    async with AsyncLLMEngine.from_engine_args(EngineArgs("m")) as engine:
        assert texts(await collect(engine.generate("hey", ALL)))[-1] == "HEY"


async def test_a_seed_gives_requests_seeds(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[SamplingParams] = []
    stream = AsyncClient.stream

    def noting(client: AsyncClient, prompt: Prompt, params: SamplingParams, **options: Any) -> AsyncGenerationStream:
        sent.append(params)
        return stream(client, prompt, params, **options)

    monkeypatch.setattr(AsyncClient, "stream", noting)
    async with AsyncLLMEngine.from_engine_args(EngineArgs("m", seed=1)) as engine:
        for params in (ALL, SamplingParams(seed=5), ALL):
            await collect(engine.generate("hey", params))
    assert [params.seed for params in sent] == [10451216379200822465, 5, 17911839290282890590]
