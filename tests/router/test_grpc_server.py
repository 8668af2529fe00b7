"""The gRPC front end over real sockets and a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from octavo.errors import (
    ERROR_TABLE,
    ConfigError,
    GenerationError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    UnavailableError,
)
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from octavo_router import grpc_errors
from octavo_router.admin import AdminServicer
from octavo_router.grpc_server import ADMIN_SERVICE, INFERENCE_SERVICE, GrpcServer
from octavo_router.metrics import Metrics
from tests.router.fake_engine import FakeEngine, make_backend

MAX_REQUEST_BYTES = 100_000
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Served:
    """A server with its engine, and stubs connected to it."""

    def __init__(self, engine: FakeEngine, server: GrpcServer, channel: grpc.aio.Channel) -> None:
        self.engine = engine
        self.server = server
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as served:
        yield served


@contextlib.asynccontextmanager
async def serve(tmp_path: Path) -> AsyncIterator[Served]:
    engine = FakeEngine()
    server = GrpcServer(
        host="127.0.0.1",
        port=0,
        socket_path=str(tmp_path / "router.sock"),
        max_request_bytes=MAX_REQUEST_BYTES,
        metrics=engine.metrics,
    )
    backend = make_backend(engine)
    await server.start(backend, AdminServicer(backend))
    await server.set_serving(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Served(engine, server, channel)
    await server.stop(0)


def details_of(error: grpc.aio.AioRpcError) -> dict[str, object]:
    """The details of a rich status, by the name of their type."""
    status = rpc_status.from_call(error)
    assert status is not None
    assert (status.code, status.message) == (error.code().value[0], error.details())
    unpacked: dict[str, object] = {}
    for packed in status.details:
        message = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        assert packed.Unpack(message)
        unpacked[packed.TypeName()] = message
    return unpacked


async def test_generate_streams(served: Served) -> None:
    responses = [response async for response in served.inference.Generate(pb.GenerateRequest(text="Hi"))]
    assert responses[0].prompt.token_count == 2
    assert "".join(delta.text for response in responses for delta in response.deltas) == "Paris."
    assert responses[-1].usage.completion_token_count == 6
    assert not served.engine.cancelled


async def test_the_first_response_does_not_wait_for_the_first_token(served: Served) -> None:
    served.engine.hold_after = 0
    call = served.inference.Generate(pb.GenerateRequest(text="Hi"))
    first = await call.read()
    assert isinstance(first, pb.GenerateResponse)
    assert first.prompt.token_count == 2
    call.cancel()


async def test_initial_metadata_tell_that_a_request_is_accepted(served: Served) -> None:
    served.engine.hold_after = 0
    request = pb.GenerateRequest(text="Hi", output={"final_only": True})
    call = served.inference.Generate(request)
    assert ("octavo-accepted", "1") in tuple(await call.initial_metadata())
    assert len(served.engine.running) == 1
    call.cancel()
    served.engine.refusal = OverloadedError("full")
    refused = served.inference.Generate(request)
    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "octavo-accepted" not in dict(await refused.initial_metadata())


async def test_the_prefix_cache_can_be_flushed(served: Served) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(served.channel)
    assert (await admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())).block_count == 5


async def test_the_other_calls(served: Served) -> None:
    assert (await served.inference.Tokenize(pb.TokenizeRequest(text="Hi"))).token_ids == [72, 105]
    assert (await served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[72, 105]))).text == "Hi"
    assert len((await served.inference.ListModels(pb.ListModelsRequest())).models) == 2


async def test_the_unix_socket_and_compression(served: Served, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'router.sock'}"
    async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await stub.Tokenize(pb.TokenizeRequest(text="x" * 1000))).token_ids == [120] * 1000


async def test_a_long_message_does_not_cost_the_status(served: Served) -> None:
    served.engine.refusal = InvalidRequestError("é" * 100_000, field="chat")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.inference.Generate(pb.GenerateRequest(text="Hi")).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "é" * (grpc_errors.MAX_MESSAGE_BYTES // 2) + "..."
    assert len(details_of(caught.value)) == 2


async def test_a_wrong_field_is_named(served: Served) -> None:
    request = pb.GenerateRequest(text="Hi")
    request.sampling.temperature = -1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.inference.Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = details_of(caught.value)
    assert details["google.rpc.ErrorInfo"] == error_details_pb2.ErrorInfo(domain="octavo.v1", reason="INVALID_REQUEST")
    violation = error_details_pb2.BadRequest.FieldViolation(
        field="sampling.temperature", description="temperature is -1; it must be from 0 to 2"
    )
    assert details["google.rpc.BadRequest"] == error_details_pb2.BadRequest(field_violations=[violation])


async def test_an_overload_says_when_to_come_again(served: Served) -> None:
    served.engine.refusal = OverloadedError("the queue is full", retry_after_s=2.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.inference.Generate(pb.GenerateRequest(text="Hi")).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = details_of(caught.value)["google.rpc.RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5


async def test_failures_within_a_stream(served: Served) -> None:
    served.engine.fail_at = 3
    for failure, code in (
        (GenerationError("its logits were not finite"), grpc.StatusCode.ABORTED),
        (UnavailableError("the server is stopping"), grpc.StatusCode.UNAVAILABLE),
        (ValueError("secret"), grpc.StatusCode.INTERNAL),
    ):
        served.engine.failure = failure
        call = served.inference.Generate(pb.GenerateRequest(text="Hi"))
        texts = []
        for _ in range(4):
            response = await call.read()
            assert isinstance(response, pb.GenerateResponse)
            texts += [delta.text for delta in response.deltas]
        assert "".join(texts) == "Par"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is code
        assert "secret" not in str(caught.value.details())
        assert "google.rpc.ErrorInfo" in details_of(caught.value)


async def test_too_large_a_message(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.inference.Tokenize(pb.TokenizeRequest(text="x" * (MAX_REQUEST_BYTES + 1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_REQUEST_BYTES) in str(caught.value.details())


async def test_cancelled_streams_leave_nothing_behind(served: Served) -> None:
    """Handlers blocked for ever on streams that had been cancelled (BR-095)."""
    served.engine.hold_after = 1

    async def read_one_and_cancel() -> None:
        call = served.inference.Generate(pb.GenerateRequest(text="Hi"))
        await call.read()
        await call.read()
        call.cancel()

    await asyncio.gather(*(read_one_and_cancel() for _ in range(50)))
    while len(served.engine.cancelled) < 50:
        served.engine.on_cancel.clear()
        await served.engine.on_cancel.wait()
    assert not served.engine.running
    served.engine.released.set()
    assert [response async for response in served.inference.Generate(pb.GenerateRequest(text="Hi"))]
    assert len(served.engine.cancelled) == 50


async def test_the_deadline_ends_the_call_and_the_request(served: Served) -> None:
    """A cancelled handler left its caller without a status (BR-096)."""
    served.engine.hold_after = 1
    call = served.inference.Generate(pb.GenerateRequest(text="Hi"), timeout=1)
    await call.read()
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served.engine.on_cancel.wait()
    assert not served.engine.running
    assert served.engine.requests[0].deadline is not None


async def test_health_by_service(served: Served) -> None:
    for name in ("", INFERENCE_SERVICE, ADMIN_SERVICE):
        assert (await served.health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    await served.server.set_serving(False)
    for name, status in (("", NOT_SERVING), (INFERENCE_SERVICE, NOT_SERVING), (ADMIN_SERVICE, SERVING)):
        assert (await served.health.Check(health_pb2.HealthCheckRequest(service=name))).status == status
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.health.Check(health_pb2.HealthCheckRequest(service="nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_is_watched_by_many_until_the_server_stops(served: Served) -> None:
    watches = [served.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)) for _ in range(3)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    watches.pop().cancel()
    await served.server.set_serving(False)
    for watch in watches:
        assert (await watch.read()).status == NOT_SERVING
    stopping = asyncio.create_task(served.server.stop(30))
    for watch in watches:
        assert await watch.read() is grpc.aio.EOF
    await stopping


async def test_reflection_describes_the_services(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {INFERENCE_SERVICE, ADMIN_SERVICE, "grpc.health.v1.Health"} <= names
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE_SERVICE))
    (data,) = (await call.read()).file_descriptor_response.file_descriptor_proto[:1]
    assert descriptor_pb2.FileDescriptorProto.FromString(data).package == "octavo.v1"
    await call.done_writing()


async def test_admin(served: Served) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(served.channel)
    served.engine.hold_after = 1
    responses = aiter(served.inference.Generate(pb.GenerateRequest(text="Hi")))
    await anext(responses)
    state = await stub.GetState(admin_pb2.GetStateRequest())
    assert (state.queue.request_count, state.draining) == (1, False)
    for _ in range(2):
        assert (await stub.Drain(admin_pb2.DrainRequest())).request_count == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.inference.Generate(pb.GenerateRequest(text="Hi")).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    served.engine.released.set()
    assert "".join([delta.text async for response in responses for delta in response.deltas]) == "Paris."


async def test_addresses_in_use_are_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{served.server.port}: the port is in use .* --grpc-port"):
        GrpcServer(host="127.0.0.1", port=served.server.port, socket_path="", max_request_bytes=1024, metrics=Metrics())
    with pytest.raises(ConfigError, match="another server listens there"):
        GrpcServer(
            host="127.0.0.1",
            port=-1,
            socket_path=str(tmp_path / "router.sock"),
            max_request_bytes=MAX_REQUEST_BYTES,
            metrics=Metrics(),
        )
    with pytest.raises(ConfigError, match="longer than 100 bytes"):
        GrpcServer(
            host="127.0.0.1",
            port=-1,
            socket_path="/" + "x" * 120,
            max_request_bytes=MAX_REQUEST_BYTES,
            metrics=Metrics(),
        )


@pytest.mark.parametrize("kind", ERROR_TABLE, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[OctavoError]) -> None:
    status = grpc_errors.status_message(kind("what happened"))
    assert isinstance(status, status_pb2.Status)
    assert status.code == ERROR_TABLE[kind].grpc_code.value[0]
    assert status.code in code_pb2.Code.values()
    assert status.message == "what happened"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == ERROR_TABLE[kind].reason


def test_a_field_of_a_wrong_request_is_a_violation_only_where_there_is_one() -> None:
    assert len(grpc_errors.status_message(InvalidRequestError("x")).details) == 1
    assert len(grpc_errors.status_message(InvalidRequestError("x", field="f")).details) == 2


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x1a\x01\xff", b"\x1a\x7f"], ids=["tag", "utf8", "truncated"])
async def test_bytes_that_are_no_message_are_the_callers_error(served: Served, data: bytes) -> None:
    for method, stub in (("Generate", served.channel.unary_stream), ("Tokenize", served.channel.unary_unary)):
        call: Any = stub(f"/{INFERENCE_SERVICE}/{method}", request_serializer=None, response_deserializer=None)(data)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "bytes are no message" in await call.details()
    value = served.engine.metrics.registry.get_sample_value
    assert value("octavo_requests_refused_total", {"reason": "invalid"}) == 1


@pytest.mark.parametrize("retry_after_s", [None, 2.5])
def test_an_outage_that_will_end_says_when_to_come_again(retry_after_s: float | None) -> None:
    status = grpc_errors.status_message(UnavailableError("what happened", retry_after_s=retry_after_s))
    found = [detail for detail in status.details if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)]
    assert bool(found) == (retry_after_s is not None)
    for detail in found:
        info = error_details_pb2.RetryInfo()
        detail.Unpack(info)
        assert info.retry_delay.ToTimedelta().total_seconds() == retry_after_s
