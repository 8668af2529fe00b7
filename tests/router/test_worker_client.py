"""The gRPC worker client against a fake worker's server: sessions, long prompts, losses, and the engine over it all."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from octavo.config import RouterConfig
from octavo_router.engine import Engine
from octavo_router.metrics import Metrics
from octavo_router.plan import BlockMoves, NewSequence, SequenceParams, StepPlan, StepResult
from octavo_router.request import Sampling, Usage
from octavo_router.worker_client import (
    GrpcWorkerClient,
    Progress,
    SessionLostError,
    WorkerUnavailableError,
    backoff,
    wait_for_worker,
)
from tests.router.fake_client import description, letter_tokenizer
from tests.router.fake_worker import expected_output, next_candidates, next_token, prompt_score
from tests.router.fake_worker_service import FakeWorkerService
from tests.router.harness import make_request
from tests.router.test_engine import read_ok, until

PARAMS = SequenceParams(
    temperature=0.5,
    top_p=0.75,
    top_k=3,
    min_p=0.25,
    seed=2**64 - 1,
    return_logprobs=True,
    top_logprob_count=2,
    suppressed_token_ids=(1,),
    min_token_count=4,
    candidate_count=0,
)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/worker.sock"


@asynccontextmanager
async def serving(
    address: str, *, num_blocks: int = 200, stop_after: int = 1 << 30
) -> AsyncGenerator[FakeWorkerService]:
    server = FakeWorkerService(description(num_blocks=num_blocks), address, stop_after=stop_after)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(address: str) -> AsyncGenerator[GrpcWorkerClient]:
    client = GrpcWorkerClient(address)
    try:
        yield client
    finally:
        await client.close()


def prefill(num_tokens: int, block_size: int = 4) -> StepPlan:
    """A session's first plan, which computes a whole prompt."""
    num_blocks = -(-num_tokens // block_size)
    return StepPlan(
        epoch=1,
        step_seq=1,
        new_sequences=[NewSequence(9, num_tokens, [index % 60 for index in range(num_tokens)], PARAMS)],
        sequence_ids=[9],
        start_positions=[0],
        token_counts=[num_tokens],
        samples=[True],
        new_block_counts=[num_blocks],
        new_block_ids=list(range(num_blocks)),
    )


async def test_describe_and_get_tokenizer(address: str) -> None:
    async with serving(address), connected(address) as client:
        assert (await client.describe()).worker_name == "worker-0"
        files = await client.get_tokenizer()
        assert files.tokenizer_json == b'{"model": {}}'
        assert list(files.defaults.eos_token_ids) == [1]
        assert files.default_sampling == Sampling(temperature=0.5, top_k=7)


async def test_a_worker_of_another_protocol_is_refused(address: str) -> None:
    async with serving(address) as server, connected(address) as client:
        server.described.protocol_version = 2
        with pytest.raises(WorkerUnavailableError, match="speaks version 2 of the worker protocol"):
            await client.describe()


async def test_a_plan_and_its_result_survive_the_wire(address: str) -> None:
    async with serving(address) as server, connected(address) as client:
        async with client.open_session(epoch=1, incarnation=77, router_name="router-0") as session:
            plan = prefill(10)
            params = dataclasses.replace(PARAMS, return_prompt_logprobs=True, top_prompt_logprob_count=2)
            plan.new_sequences[0] = dataclasses.replace(plan.new_sequences[0], params=params)
            await session.send(plan)
            await session.renew()
            async with aclosing(session.messages()) as messages:
                assert await anext(messages) == Progress(1, busy=False)
                result = await anext(messages)
            await until(lambda: len(server.requests) == 3)
        token_id = next_token(list(range(10)), PARAMS.seed, (1,))
        assert isinstance(result, StepResult)
        assert (result.epoch, result.step_seq, result.sequence_ids, result.token_ids) == (1, 1, [9], [token_id])
        assert result.logprobs.top_counts == [2]
        assert result.logprobs.unpack([token_id])[0].logprob == -(token_id + 1) / 8
        assert (result.duration_us, result.idle_us) == (1000, 10)
        (stretch,) = result.prompt_logprobs
        assert (stretch.sequence_id, stretch.start_position) == (9, 1)
        expected = [prompt_score(list(range(10)), position, 2) for position in range(1, 10)]
        entries = stretch.columns.unpack(list(range(1, 10)))
        assert [(entry.logprob, list(entry.top)) for entry in entries] == expected
        assert server.worker is not None
        assert server.worker.sequences[9].params == params
        opening, sent, renewal = server.requests[:3]
        assert (opening.epoch, opening.incarnation, opening.step_seq) == (1, 77, 1)
        assert opening.open.router_name == "router-0"
        assert (sent.step_seq, renewal.step_seq, renewal.WhichOneof("body")) == (1, 2, "renew")


async def test_moves_forks_and_candidates_survive_the_wire(address: str) -> None:
    params = dataclasses.replace(PARAMS, candidate_count=3, return_logprobs=False)
    prompt = [5, 6, 7, 8, 9, 10]
    async with serving(address) as server, connected(address) as client:
        server.described.kv_memory.host_block_count = 4
        async with client.open_session(epoch=1, incarnation=77, router_name="router-0") as session:
            first = prefill(6)
            first.new_sequences = [NewSequence(9, 6, prompt, params)]
            second = StepPlan(epoch=1, step_seq=2, release_sequence_ids=[9])
            second.moves.swap_out = BlockMoves([0, 1], [3, 2])
            third = StepPlan(epoch=1, step_seq=3, new_sequences=[NewSequence(9, 6, prompt, params, [5, 6])])
            third.moves.swap_in = BlockMoves([3, 2], [5, 6])
            fourth = StepPlan(
                epoch=1,
                step_seq=4,
                sequence_ids=[9, 10],
                start_positions=[6, 6],
                token_counts=[1, 1],
                samples=[True, True],
                new_block_counts=[0, 0],
            )
            fourth.moves.copies = BlockMoves([6], [7])
            fourth.forks.append(9, 9, num_kept=6, token_id=20, table=[5, 6])
            fourth.forks.append(9, 10, num_kept=6, token_id=30, table=[5, 7])
            results = []
            async with aclosing(session.messages()) as messages:
                for plan in (first, second, third, fourth):
                    await session.send(plan)
                    while not isinstance(message := await anext(messages), StepResult):
                        pass
                    results.append(message)
    assert server.worker is not None
    assert server.worker.sequences[9].params == params
    expected = [
        (sequence_id, next_candidates([*prompt, *more], 3, (1,))) for sequence_id, more in ((9, [20]), (10, [30]))
    ]
    found = [
        (beam.sequence_id, list(zip(beam.token_ids, beam.logprobs, strict=True))) for beam in results[3].candidates
    ]
    assert found == expected


@pytest.mark.parametrize(("num_tokens", "pieces"), [(32 * 1024, [32 * 1024]), (70_000, [32_768, 32_768, 4_464])])
async def test_a_long_sequence_goes_in_pieces(address: str, num_tokens: int, pieces: list[int]) -> None:
    async with serving(address, num_blocks=20_000) as server, connected(address) as client:
        async with client.open_session(epoch=1, incarnation=77, router_name="router-0") as session:
            await session.send(prefill(num_tokens))
            async with aclosing(session.messages()) as messages:
                await anext(messages)
                result = await anext(messages)
        assert isinstance(result, StepResult)
        assert result.token_ids == [next_token([index % 60 for index in range(num_tokens)], PARAMS.seed, (1,))]
        ahead = [len(request.sequence_tokens.token_ids) for request in server.requests[1:-1]]
        assert [*ahead, len(server.requests[-1].plan.new_sequences[0].token_ids)] == pieces
        assert {request.step_seq for request in server.requests} == {1}


async def test_a_session_that_the_worker_refuses(address: str) -> None:
    async with serving(address) as server, connected(address) as client:
        server.described.last_epoch = 5
        with pytest.raises(SessionLostError, match="FAILED_PRECONDITION: epoch 5 is not a new one"):
            async with client.open_session(epoch=5, incarnation=77, router_name="router-0"):
                pass


async def test_a_session_whose_worker_dies(address: str) -> None:
    async with (
        serving(address, stop_after=1),
        connected(address) as client,
        client.open_session(epoch=1, incarnation=77, router_name="router-0") as session,
    ):
        await session.send(prefill(3))
        with pytest.raises(SessionLostError, match="UNAVAILABLE: the fake worker dies"):
            async for _ in session.messages():
                pass
        with pytest.raises(SessionLostError):
            await session.send(prefill(3))
        with pytest.raises(SessionLostError):
            await session.renew()


async def test_waiting_for_a_worker_says_so(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo_router")
    async with connected(address) as client:
        waiting = asyncio.create_task(wait_for_worker(client))
        await until(lambda: bool(caplog.records))
        async with serving(address):
            assert (await waiting).worker_name == "worker-0"
    assert caplog.messages[0].startswith(f"waiting for the worker at {address} (0 s): UNAVAILABLE")
    assert caplog.records[0].levelno == logging.INFO  # a warning only after a while: at a start it is as it should be


def test_delays_double_up_to_a_bound() -> None:
    assert list(itertools.islice(backoff(), 8)) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


async def test_the_engine_replays_on_a_worker_that_was_restarted(address: str) -> None:
    requests = [make_request(f"R{index}", num_prompt=5 + 9 * index, max_tokens=30, seed=index) for index in range(4)]
    engine = Engine(RouterConfig(), GrpcWorkerClient(address), letter_tokenizer(), Metrics())
    async with asyncio.timeout(20):
        async with serving(address, stop_after=10) as first:
            await engine.start()
            readers = [asyncio.create_task(read_ok(engine.submit(request))) for request in requests]
            await first.stopped.wait()
        async with serving(address) as second:
            second.described.incarnation = 78
            for request, reader in zip(requests, readers, strict=True):
                answer = await reader
                assert answer.only.token_ids == expected_output(request)[0]
                assert answer.usage == Usage(len(request.prompt_token_ids), 30)
            (worker,) = engine.state().workers
            assert worker.incarnation == 78
            assert worker.lost_session_count >= 1
            await engine.stop()
