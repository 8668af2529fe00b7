from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.channel import is_serving
from octavo.client import Client
from octavo.config import RouterConfig, WorkerConfig
from octavo.errors import OctavoError, StartError
from octavo.process import Endpoints, ProcessPair, RestartPolicy
from octavo.program import ProgramSpec

Programs = tuple[ProgramSpec, ProgramSpec]

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, fast_death_s=60, max_fast_deaths=3)
SOCKET_ONLY = RouterConfig(port=-1, grpc_port=-1, grace_period_s=5)


class Log:
    """Takes both programs' logs, and waits for lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")
        self._new.put(f"{name}: {line}")

    def wait_for(self, text: str) -> str:
        """The next line with the text in it. Raises queue.Empty after 10 s without a line."""
        while True:
            if text in (line := self._new.get(timeout=10)):
                return line


def start(programs: Programs, log: Log, **options: object) -> ProcessPair:
    arguments = {"policy": QUICK, **options}
    return ProcessPair(WorkerConfig(model="m"), SOCKET_ONLY, on_log=log, programs=programs, **arguments)  # type: ignore[arg-type]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "has not come true within 10 s"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process of this id runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_serves_and_stops_in_order(programs: Programs) -> None:
    log = Log()
    ended: list[OctavoError | None] = []
    with start(programs, log, on_end=ended.append) as pair:
        endpoints = pair.wait_ready(10)
        assert endpoints.grpc.startswith("unix:")
        assert endpoints.http == ""
        with Client(endpoints.grpc) as client:
            assert client.generate("hi").outputs[0].text == "HI"
        folder = Path(endpoints.grpc.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        pids = list(pair.pids().values())
    assert log.lines[-2:] == ["router: router says goodbye", "worker: worker says goodbye"]
    assert ended == [None]
    assert not any(map(is_running, pids))
    assert not folder.exists()
    pair.stop()


def test_each_program_gets_its_flags_and_the_common_socket(programs: Programs) -> None:
    log = Log()
    with start(programs, log) as pair:
        pair.wait_ready(10)
    flags = {
        name: next(line for line in log.lines if f"{name} flags" in line).split()[3:] for name in ("worker", "router")
    }
    listen = next(flag for flag in flags["worker"] if flag.startswith("--listen="))
    assert f"--worker={listen.removeprefix('--listen=')}" in flags["router"]
    assert "--model=m" in flags["worker"]
    assert not any(flag.startswith("--model") for flag in flags["router"])


def test_ready_addresses_are_those_of_the_router(programs: Programs) -> None:
    told: list[Endpoints] = []
    pair = ProcessPair(WorkerConfig(), RouterConfig(), on_log=Log(), on_ready=told.append, programs=programs)
    with pair:
        endpoints = pair.wait_ready(10)
    assert (endpoints.grpc, endpoints.http) == ("127.0.0.1:50051", "http://127.0.0.1:8000")
    assert endpoints.local.startswith("unix:")
    assert told == [endpoints]


def test_the_programs_share_a_token_that_stands_in_no_flag(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_WORKER_TOKEN", "of-somebody-else")
    log = Log()
    with ProcessPair(WorkerConfig(), RouterConfig(api_key=("key-of-a-client",)), on_log=log, programs=programs) as pair:
        pair.wait_ready(10)
        variables = {
            name: dict(entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if entry)
            for name, pid in pair.pids().items()
        }
        arguments = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pair.pids().values())
    token = variables["worker"]["OCTAVO_WORKER_TOKEN"]
    assert len(token) >= 40
    assert variables["router"]["OCTAVO_WORKER_TOKEN"] == token
    assert variables["router"]["OCTAVO_API_KEY"] == "key-of-a-client"
    assert "OCTAVO_API_KEY" not in variables["worker"]
    assert token not in arguments
    assert "key-of-a-client" not in arguments


def test_a_restarted_router_keeps_the_ports_that_were_drawn(programs: Programs) -> None:
    log = Log()
    config = RouterConfig(port=0, grpc_port=0, grace_period_s=5)
    with ProcessPair(WorkerConfig(), config, on_log=log, policy=QUICK, programs=programs) as pair:
        assert pair.wait_ready(10).http == "http://127.0.0.1:18000"
        assert "--port=0" in log.wait_for("router flags")
        os.kill(pair.pids()["router"], signal.SIGKILL)
        flags = log.wait_for("router flags")
    assert "--port=18000" in flags
    assert "--grpc-port=15051" in flags


@pytest.mark.parametrize("name", ["worker", "router"])
def test_a_program_that_dies_is_started_again(programs: Programs, name: str) -> None:
    log = Log()
    with start(programs, log) as pair:
        endpoints = pair.wait_ready(10)
        before = pair.pids()
        os.kill(before[name], signal.SIGKILL)
        assert "was killed by SIGKILL; starting it again in 0.01 s" in log.wait_for("octavo: ")
        wait_until(lambda: pair.pids().get(name) not in (None, before[name]))
        other = {"worker": "router", "router": "worker"}[name]
        assert pair.pids()[other] == before[other]
        wait_until(lambda: is_serving(endpoints.grpc, timeout_s=1))


def test_a_program_that_keeps_dying_is_given_up(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "die"
    monkeypatch.setenv("FAKE_WORKER", f"once:{marker}")
    ended: queue.SimpleQueue[OctavoError | None] = queue.SimpleQueue()
    with start(programs, Log(), on_end=ended.put) as pair:
        pair.wait_ready(10)
        router = pair.pids()["router"]
        marker.touch()
        os.kill(pair.pids()["worker"], signal.SIGKILL)
        error = ended.get(timeout=10)
    assert isinstance(error, StartError)
    assert "the worker died 3 times in a row" in error.message
    assert pair.error is error
    assert not is_running(router)


def test_a_death_at_start_shows_the_log(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ROUTER", "waits")
    monkeypatch.setenv("FAKE_WORKER", "exit:3:out of memory")
    with start(programs, Log()) as pair, pytest.raises(StartError) as error:
        pair.wait_ready(10)
    assert error.value.message.startswith("the worker exited with code 3 before it was ready")
    assert error.value.message.endswith("  out of memory")
    assert error.value.exit_code == 3


def test_a_usage_error_at_start_is_told_in_the_program_s_words(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ROUTER", "waits")
    monkeypatch.setenv("FAKE_WORKER", "exit:2:octavo-worker: error: no model 'm'")
    with start(programs, Log()) as pair, pytest.raises(StartError) as error:
        pair.wait_ready(10)
    assert error.value.message == "no model 'm'"
    assert error.value.exit_code == 2


def test_a_stubborn_program_is_killed(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ROUTER", "stubborn")
    with start(programs, Log()) as pair:
        pair.wait_ready(10)
        router = pair.pids()["router"]
        pair.stop(at_once=True)
        assert not is_running(router)


def test_missing_program_names_the_distribution() -> None:
    missing = ProgramSpec("worker", "octavo_no_such_module", "octavo-worker")
    with pytest.raises(StartError, match="pip install octavo-worker"):
        ProcessPair(WorkerConfig(), RouterConfig(), on_log=Log(), programs=(missing, missing))


def test_children_end_when_their_parent_is_killed(programs: Programs) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.clients.test_process import Log, start
from tests.clients.conftest import PROGRAMS
pair = start(PROGRAMS, Log())
pair.wait_ready(10)
print(pair.wait_ready().grpc, *pair.pids().values(), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        address, *words = parent.stdout.readline().split()
        pids = [int(word) for word in words]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        parent.kill()
    wait_until(lambda: not any(map(is_running, pids)))
    shutil.rmtree(Path(address.removeprefix("unix:")).parent)  # nobody was left to do it


def test_a_long_temporary_folder_is_avoided(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long_folder = tmp_path / ("x" * 90)
    long_folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    with start(programs, Log()) as pair:
        path = pair.wait_ready(10).grpc.removeprefix("unix:")
    assert path.startswith("/tmp/octavo-")
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(FileNotFoundError):
        probe.connect(path)
