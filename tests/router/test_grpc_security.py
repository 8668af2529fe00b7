"""Keys, TLS and limits of the gRPC front end, over real sockets and a fake engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from octavo.authentication import KeyRing
from octavo.config import RouterConfig
from octavo.tls import server_identity
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from octavo_router.admin import AdminServicer
from octavo_router.grpc_server import GrpcServer
from tests.certificates import Certificates, make_certificates
from tests.router.fake_engine import FakeEngine, make_backend

KEY = "a-good-key"
METADATA = (("authorization", f"Bearer {KEY}"),)


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, **options: Any) -> AsyncIterator[GrpcServer]:
    engine = FakeEngine()
    server = GrpcServer(
        host="127.0.0.1",
        port=0,
        socket_path=str(tmp_path / "router.sock"),
        max_request_bytes=100_000,
        metrics=engine.metrics,
        **options,
    )
    backend = make_backend(engine)
    await server.start(backend, AdminServicer(backend))
    await server.set_serving(True)
    yield server
    await server.stop(0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def code_of(call: Any) -> grpc.StatusCode:
    """How a call ends, of whatever kind it is."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def calls(channel: grpc.aio.Channel, metadata: Any) -> dict[str, Any]:
    """A call of every kind, by name."""
    inference, admin = inference_pb2_grpc.InferenceServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel)
    reflecting: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    unknown: Any = channel.unary_unary("/octavo.v1.None/Such")
    request = pb.GenerateRequest(text="Hi")
    return {
        "Generate": inference.Generate(request, metadata=metadata, timeout=10),
        "ListModels": inference.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=10),
        "GetState": admin.GetState(admin_pb2.GetStateRequest(), metadata=metadata, timeout=10),
        # Nothing is written to it: to grpc.aio a write to a call that was refused is an error of its own, INTERNAL.
        "Reflection": reflecting.ServerReflectionInfo(metadata=metadata, timeout=10),
        "Unknown": unknown(b"", metadata=metadata, timeout=10),
    }


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization-bin", b"Bearer x"),)])
@pytest.mark.parametrize("where", ["port", "socket"])
async def test_calls_without_a_good_key(tmp_path: Path, metadata: Any, where: str) -> None:
    async with serving(tmp_path, keys=KeyRing([KEY])) as server:
        address = f"127.0.0.1:{server.port}" if where == "port" else f"unix:{tmp_path}/router.sock"
        async with grpc.aio.insecure_channel(address) as channel:
            for name, call in calls(channel, metadata).items():
                assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED, name
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1


async def test_calls_with_a_good_key(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, keys=KeyRing(["other", KEY])) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        for name, call in calls(channel, METADATA).items():
            if name == "Reflection":
                await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                await call.done_writing()
            expected = grpc.StatusCode.UNIMPLEMENTED if name == "Unknown" else grpc.StatusCode.OK
            assert await code_of(call) is expected, name


async def test_the_refusal_is_a_rich_status(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, keys=KeyRing([KEY])) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
    status = rpc_status.from_call(caught.value)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("octavo.v1", "UNAUTHENTICATED")
    assert KEY not in status.message


async def test_tls_is_on_the_port_alone(tmp_path: Path, files: Certificates) -> None:
    config = RouterConfig.from_values({"ssl_keyfile": files.server_key, "ssl_certfile": files.server_chain}, {})
    identity = server_identity(config)
    assert identity is not None
    credentials = grpc.ssl_channel_credentials(files.authority.read_bytes())
    request = pb.ListModelsRequest()
    async with serving(tmp_path, credentials=identity.server_credentials()) as server:
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.secure_channel(address, credentials) as channel:
            assert (await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(request, timeout=10)).models
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert await code_of(stub.ListModels(request, timeout=10)) is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/router.sock") as channel:
            assert (await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(request, timeout=10)).models


async def test_metadata_has_a_limit(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for size, code in ((10_000, grpc.StatusCode.OK), (40_000, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            call = stub.ListModels(pb.ListModelsRequest(), metadata=(("x-note", "x" * size),), timeout=10)
            assert await code_of(call) is code


async def test_connections_have_a_limit(tmp_path: Path) -> None:
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with serving(tmp_path, max_connections=1) as server:
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address, options=own) as first:
            call = inference_pb2_grpc.InferenceServiceStub(first).ListModels(pb.ListModelsRequest(), timeout=10)
            assert await code_of(call) is grpc.StatusCode.OK
            async with grpc.aio.insecure_channel(address, options=own) as second:
                call = inference_pb2_grpc.InferenceServiceStub(second).ListModels(pb.ListModelsRequest(), timeout=0.5)
                assert await code_of(call) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
