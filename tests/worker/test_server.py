"""The session rules through a real server: `grpc.aio` on a port of its own, a tiny model behind it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc as pb_grpc
from octavo_kernels import Backend
from octavo_worker import server as server_module
from octavo_worker.executor import Executor
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.listen import bind, make_server
from octavo_worker.models.decoder import Decoder
from octavo_worker.server import SERVICE, WorkerServicer, add_services
from octavo_worker.session import PROTOCOL_VERSION, Lease
from octavo_worker.tokenizer import TokenizerBundle
from tests.worker.conftest import make_executor, new_sequence, schedule

INCARNATION = 77
PROMPT = [3, 14, 15, 92]
TOKENIZER = TokenizerBundle(bytes(range(256)) * 10_000, pb.TokenizerDefaults(eos_token="</s>"), 96)


class Worker:
    """A served tiny model and a stub to call it with."""

    def __init__(self, executor: Executor, lease_s: float) -> None:
        self.executor = executor
        self.thread = ExecutorThread()
        self.lease = Lease(INCARNATION, lease_s, max_plans_in_flight=2)
        description = pb.DescribeResponse(worker_name="worker-7", incarnation=INCARNATION)
        self.servicer = WorkerServicer(executor, self.thread, self.lease, description, TOKENIZER)
        self.server = make_server()

    async def __aenter__(self) -> Worker:
        with bind(self.server, "127.0.0.1:0") as address:
            await add_services(self.server, self.servicer)
            await self.server.start()
            self.channel = grpc.aio.insecure_channel(address)
            self.stub = pb_grpc.WorkerServiceStub(self.channel)
            return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()
        await self.server.stop(None)
        assert self.thread.stop(10)

    async def open(self, epoch: int = 1, name: str = "router-a", **changes: Any) -> Stream:
        """A stream whose `open` was answered."""
        stream = Stream(self.stub.Run(), epoch)
        await stream.send(open=pb.OpenSession(protocol_version=PROTOCOL_VERSION, router_name=name), **changes)
        response = await stream.receive()
        assert response.WhichOneof("body") == "opened"
        return stream


class Stream:
    """A session as a router holds it."""

    def __init__(self, call: Any, epoch: int) -> None:
        self.call, self.epoch, self.next_step = call, epoch, 1

    async def send(self, **body: Any) -> None:
        header: dict[str, Any] = {"epoch": self.epoch, "incarnation": INCARNATION, "step_seq": self.next_step}
        await self.call.write(pb.RunRequest(**{**header, **body}))
        if "plan" in body:
            self.next_step += 1

    async def receive(self) -> pb.RunResponse:
        async with asyncio.timeout(20):
            response = await self.call.read()
        assert isinstance(response, Message), await self.status()
        return response

    async def result(self) -> pb.RunResponse:
        """The next result; progress is skipped."""
        while (response := await self.receive()).WhichOneof("body") == "progress":
            pass
        return response

    async def until_end(self) -> None:
        """Reads what is left. Raises the error that the stream ends with."""
        while await self.call.read() is not grpc.aio.EOF:
            pass

    async def status(self) -> tuple[grpc.StatusCode, str]:
        async with asyncio.timeout(20):
            return await self.call.code(), await self.call.details()


@pytest.fixture
async def worker(decoder: Decoder, backend: Backend) -> AsyncIterator[Worker]:
    async with Worker(make_executor(decoder, backend), lease_s=30) as worker:
        yield worker


def plan(sequence_id: int = 1, blocks: tuple[int, ...] = (0, 1)) -> pb.StepPlan:
    return pb.StepPlan(
        new_sequences=[new_sequence(sequence_id, PROMPT, list(blocks))], scheduled=schedule((sequence_id, 0, 4, True))
    )


def decode(position: int, sequence_id: int = 1) -> pb.StepPlan:
    return pb.StepPlan(scheduled=schedule((sequence_id, position, 1, True)))


async def test_describe_health_and_reflection(worker: Worker) -> None:
    description = await worker.stub.Describe(pb.DescribeRequest())
    assert (description.worker_name, description.last_epoch) == ("worker-7", 0)
    await worker.open(epoch=5)
    assert (await worker.stub.Describe(pb.DescribeRequest())).last_epoch == 5
    health = health_pb2_grpc.HealthStub(worker.channel)
    for name in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for listing in call:
        assert SERVICE in {service.name for service in listing.list_services_response.service}


async def test_tokenizer_comes_in_pieces(worker: Worker) -> None:
    pieces = [piece async for piece in worker.stub.GetTokenizer(pb.GetTokenizerRequest())]
    assert pieces[0].defaults.eos_token == "</s>"
    assert all(len(piece.tokenizer_json) <= 1 << 20 for piece in pieces[1:])
    assert b"".join(piece.tokenizer_json for piece in pieces[1:]) == TOKENIZER.tokenizer_json
    assert len(pieces) == 4


async def test_two_plans_in_flight_are_answered_in_order(worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(sequence_tokens=pb.SequenceTokens(sequence_id=1, token_ids=PROMPT[:2]))
    first = plan()
    del first.new_sequences[0].token_ids[:2]
    await stream.send(plan=first)
    await stream.send(plan=decode(4))
    await stream.send(renew=pb.Renew())
    results = [await stream.result(), await stream.result()]
    assert [result.step_seq for result in results] == [1, 2]
    assert all((result.epoch, result.incarnation) == (1, INCARNATION) for result in results)
    assert [list(result.result.sequence_ids) for result in results] == [[1], [1]]
    assert all(result.result.duration_us > 0 and result.result.idle_us > 0 for result in results)


async def test_sequences_end_with_their_session(worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(plan=plan())
    await stream.result()
    await stream.call.done_writing()
    assert await stream.call.read() is grpc.aio.EOF
    assert (await stream.status())[0] is grpc.StatusCode.OK
    again = await worker.open(epoch=2)
    await again.send(plan=decode(4))
    result = (await again.result()).result
    assert [error.message for error in result.errors] == ["the sequence is not known"]


async def test_plans_sent_before_the_router_closes_are_answered(worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(plan=plan())
    await stream.call.done_writing()
    assert (await stream.result()).step_seq == 1
    assert await stream.call.read() is grpc.aio.EOF


async def test_second_router_is_refused_while_the_lease_is_held(worker: Worker) -> None:
    first = await worker.open()
    second = Stream(worker.stub.Run(), 2)
    await second.send(open=pb.OpenSession(protocol_version=PROTOCOL_VERSION, router_name="router-b"))
    code, details = await second.status()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "router 'router-a' holds this worker's lease" in details
    await first.send(plan=plan())
    assert (await first.result()).step_seq == 1


async def test_cancelled_stream_gives_the_lease_back(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = await worker.open()
    await first.send(plan=plan())
    first.call.cancel()
    async with asyncio.timeout(20):
        while True:
            second = Stream(worker.stub.Run(), 2)
            await second.send(open=pb.OpenSession(protocol_version=PROTOCOL_VERSION, router_name="router-b"))
            if isinstance(await second.call.read(), Message):
                break
    assert "session of router 'router-a' ended, epoch 1: the router is gone" in caplog.messages


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epoch": 9, "renew": pb.Renew()}, "of epoch 9"),
        ({"incarnation": 1, "renew": pb.Renew()}, "incarnation"),
        ({"step_seq": 3, "plan": pb.StepPlan()}, "step_seq 3; expected was 1"),
        ({"open": pb.OpenSession()}, "open already"),
    ],
)
async def test_message_that_does_not_fit_ends_the_session(worker: Worker, changes: dict[str, Any], text: str) -> None:
    stream = await worker.open()
    await stream.send(**changes)
    code, details = await stream.status()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert text in details
    await worker.open(epoch=2)


async def test_other_protocol_is_refused(worker: Worker) -> None:
    stream = Stream(worker.stub.Run(), 1)
    await stream.send(open=pb.OpenSession(protocol_version=99))
    assert await stream.status() == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "the router speaks protocol version 99, this worker 1",
    )


async def test_plan_beyond_those_that_may_be_in_flight(worker: Worker) -> None:
    leave = threading.Event()
    stream = await worker.open()
    worker.thread.submit(lambda: leave.wait(20))
    for _ in range(3):
        await stream.send(plan=pb.StepPlan())
    code, details = await stream.status()
    leave.set()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "plan 3 came while 2 plans were not answered" in details


async def test_silence_ends_the_lease(decoder: Decoder, backend: Backend) -> None:
    async with Worker(make_executor(decoder, backend), lease_s=0.2) as worker:
        stream = await worker.open()
        code, details = await stream.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == "the lease lapsed: nothing was heard of router 'router-a' for 0.2 s"


async def test_messages_renew_the_lease(decoder: Decoder, backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    async with Worker(make_executor(decoder, backend), lease_s=0.4) as worker:
        stream = await worker.open()
        for _ in range(4):
            await asyncio.sleep(0.2)
            await stream.send(renew=pb.Renew())
        await stream.send(plan=plan())
        assert (await stream.result()).step_seq == 1
        with pytest.raises(grpc.aio.AioRpcError, match="the lease lapsed"):
            await stream.until_end()
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_who_has_closed_its_side_is_answered_however_long_that_takes(
    decoder: Decoder, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Worker(make_executor(decoder, backend), lease_s=0.2) as worker:
        real = worker.executor.begin
        monkeypatch.setattr(worker.executor, "begin", lambda plan: (time.sleep(0.15), real(plan))[1])
        stream = await worker.open()
        for step in (plan(), decode(4)):
            await stream.send(plan=step)
        await stream.call.done_writing()
        assert [(await stream.result()).step_seq for _ in range(2)] == [1, 2]
        assert await stream.call.read() is grpc.aio.EOF


async def test_progress_comes_while_a_step_runs_and_while_idle(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PROGRESS_S", 0.01)
    entered, leave = threading.Event(), threading.Event()
    stream = await worker.open()
    real = worker.executor.begin
    monkeypatch.setattr(worker.executor, "begin", lambda plan: (entered.set(), leave.wait(20), real(plan))[2])
    await stream.send(plan=plan())
    await asyncio.to_thread(entered.wait, 20)
    response = await stream.receive()
    while not response.progress.busy:
        response = await stream.receive()
    assert (response.WhichOneof("body"), response.step_seq) == ("progress", 0)
    leave.set()
    assert (await stream.result()).step_seq == 1
    response = await stream.receive()
    while response.progress.busy:
        response = await stream.receive()
    assert (response.WhichOneof("body"), response.step_seq) == ("progress", 1)


async def test_failed_step_ends_the_stream_and_the_worker_goes_on(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in a step left its callers waiting (BR-099)."""
    stream = await worker.open()
    both_are_sent = threading.Event()

    def fail(*args: Any, **kwargs: Any) -> None:
        both_are_sent.wait(60)
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(worker.executor.decoder, "hidden", fail)
        await stream.send(plan=plan())
        await stream.send(plan=decode(4))
        both_are_sent.set()
        code, details = await stream.status()
    assert code is grpc.StatusCode.INTERNAL
    assert details == "the step failed: RuntimeError: the device is gone"
    again = await worker.open(epoch=2)
    await again.send(plan=plan())
    assert list((await again.result()).result.sequence_ids) == [1]


async def test_a_device_that_fails_ends_the_worker_and_opens_no_session(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await worker.open()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(worker.executor, "begin", fail)
    monkeypatch.setattr(worker.executor, "reset", fail)
    await stream.send(plan=plan())
    assert await stream.status() == (grpc.StatusCode.INTERNAL, "the step failed: RuntimeError: the device is gone")
    late = Stream(worker.stub.Run(), 2)
    await late.send(open=pb.OpenSession(protocol_version=PROTOCOL_VERSION, router_name="router-b"))
    assert await late.status() == (grpc.StatusCode.INTERNAL, "the device failed: RuntimeError: the device is gone")
    assert worker.servicer.device_failed.is_set()
    monkeypatch.undo()


async def test_plan_that_makes_no_sense_ends_the_stream(worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(plan=pb.StepPlan(copies=pb.BlockMoves(source_block_ids=[1])))
    code, details = await stream.status()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "1 sources and 0 targets" in details


async def test_stopping_ends_sessions_and_refuses_new_ones(worker: Worker) -> None:
    stream = await worker.open()
    worker.servicer.stop()
    assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
    late = Stream(worker.stub.Run(), 2)
    assert (await late.status())[0] is grpc.StatusCode.UNAVAILABLE
