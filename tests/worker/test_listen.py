from __future__ import annotations

import socket
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo_worker.listen import bind, make_server


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
