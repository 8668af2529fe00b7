from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc as pb_grpc
from octavo_worker.listen import Access, bind, make_server
from tests.certificates import make_certificates


async def test_port_0_gives_the_real_port() -> None:
    server = make_server()
    with bind(server, "127.0.0.1:0") as address:
        assert int(address.rpartition(":")[2]) > 0
    await server.stop(None)


async def test_port_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ConfigError, match=f"cannot listen on {listen}: the address is in use"),
            bind(make_server(), listen),
        ):
            pass
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "listen", ["50061", "localhost", "127.0.0.1:x", "127.0.0.1:99999", ":5", "unix:/no/such/w.sock"]
)
async def test_addresses_that_are_wrong(listen: str) -> None:
    with pytest.raises(ConfigError, match="listen is"), bind(make_server(), listen):
        pass


async def test_stale_socket_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    server = make_server()
    with bind(server, f"unix:{path}") as address:
        assert address == f"unix:{path}"
        assert path.is_socket()
        await server.start()
        with pytest.raises(ConfigError, match="another process listens there"), bind(make_server(), f"unix:{path}"):
            pass
    await server.stop(None)
    assert not path.exists()


async def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is a file that is not a socket"), bind(make_server(), f"unix:{path}"):
        pass
    assert path.read_text() == "mine"


def stub_of(channel: grpc.aio.Channel) -> pb_grpc.WorkerServiceAsyncStub:
    return pb_grpc.WorkerServiceStub(channel)


@contextlib.asynccontextmanager
async def serving(access: Access) -> AsyncIterator[str]:
    """A worker's server without a worker behind it."""
    server = make_server(access)
    with bind(server, "127.0.0.1:0", access) as address:
        pb_grpc.add_WorkerServiceServicer_to_server(pb_grpc.WorkerServiceServicer(), server)  # type: ignore[abstract]
        await server.start()
        yield address
    await server.stop(None)


async def code_of_describe(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub_of(channel).Describe(pb.DescribeRequest(), metadata=metadata, timeout=10)
    return caught.value.code()


async def test_only_callers_with_the_token_are_served() -> None:
    async with serving(Access("secret")) as address, grpc.aio.insecure_channel(address) as channel:
        assert await code_of_describe(channel) is grpc.StatusCode.UNAUTHENTICATED
        wrong = await code_of_describe(channel, ("authorization", "Bearer other"))
        assert wrong is grpc.StatusCode.UNAUTHENTICATED
        right = await code_of_describe(channel, ("authorization", "Bearer secret"))
        assert right is grpc.StatusCode.UNIMPLEMENTED  # it came through to the servicer
        public = inference_pb2_grpc.InferenceServiceStub(channel).ListModels(inference_pb2.ListModelsRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="a worker serves its router alone"):
            await public


async def test_only_callers_with_a_certificate_are_served(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    config = WorkerConfig(
        worker_ssl_keyfile=str(files.server_key),
        worker_ssl_certfile=str(files.server_chain),
        worker_ssl_ca_certs=str(files.authority),
    )
    trusted = files.authority.read_bytes()
    strangers = make_certificates(tmp_path / "strangers")
    async with serving(Access.of(config)) as address:
        for shown, expected in (
            (files, grpc.StatusCode.UNIMPLEMENTED),
            (strangers, grpc.StatusCode.UNAVAILABLE),
            (None, grpc.StatusCode.UNAVAILABLE),
        ):
            pair = (shown.client_key.read_bytes(), shown.client_chain.read_bytes()) if shown else ()
            async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted, *pair)) as channel:
                assert await code_of_describe(channel) is expected
        async with grpc.aio.insecure_channel(address) as channel:
            assert await code_of_describe(channel) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"listen": "0.0.0.0:50061"}, True),
        ({"listen": "10.0.0.1:50061"}, True),
        ({"listen": "0.0.0.0:50061", "worker_token": "secret"}, False),
        ({"listen": "127.0.0.1:50061"}, False),
        ({"listen": "[::1]:50061"}, False),
        ({"listen": "unix:/tmp/w.sock"}, False),
    ],
)
def test_a_worker_that_everybody_can_use_says_so(
    settings: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Access.of(WorkerConfig.from_values(settings, {}))
    assert ["everybody who reaches" in record.message for record in caplog.records] == [True] * warned


def test_a_token_is_in_no_repr() -> None:
    assert "secret" not in repr(Access("secret"))
