from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from octavo.cli import main
from octavo.errors import UnavailableError
from octavo.process import ProcessPair, RestartPolicy
from octavo.program import ProgramSpec

POLICY = RestartPolicy(first_delay_s=0.01, max_fast_deaths=1)


@pytest.fixture
def pairs(programs: tuple[ProgramSpec, ProgramSpec], monkeypatch: pytest.MonkeyPatch) -> list[ProcessPair]:
    """The pairs that the command starts, of the stand-ins."""
    started: list[ProcessPair] = []

    @functools.wraps(ProcessPair)
    def start(*args: object, **kwargs: object) -> ProcessPair:
        started.append(ProcessPair(*args, **kwargs, policy=POLICY, programs=programs))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr("octavo.cli.serve.ProcessPair", start)
    monkeypatch.setattr("octavo.cli.server_choice.ProcessPair", start)
    return started


def when_ready(pairs: list[ProcessPair], act: Callable[[ProcessPair], None]) -> None:
    """Does something, from another thread, once the pair serves."""

    def wait() -> None:
        while not pairs:
            time.sleep(0.01)
        pairs[0].wait_ready(10)
        act(pairs[0])

    threading.Thread(target=wait, daemon=True).start()


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal_and_exits_0(
    number: signal.Signals, pairs: list[ProcessPair], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    when_ready(pairs, lambda pair: kill_self(number))
    assert main(["serve", "m", "--port=8123", "--grpc-port=-1", "--block-size=8"]) == 0
    captured = capsys.readouterr()
    assert "Serving fake after " in captured.out
    assert "  HTTP  http://127.0.0.1:8123/v1\n" in captured.out
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in captured.out
    assert '"model": "fake"' in captured.out
    assert "worker | worker flags: --model=m" in captured.err
    assert f"octavo | {number.name}: stopping" in captured.err
    assert captured.err.index("router says goodbye") < captured.err.index("worker says goodbye")
    assert signal.getsignal(number) is before


@pytest.mark.timeout(30)
def test_a_signal_that_another_thread_gets_stops_too(
    pairs: list[ProcessPair], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt_myself(pair: ProcessPair) -> None:
        time.sleep(0.2)  # until the command waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    when_ready(pairs, interrupt_myself)
    assert main(["serve", "--port=-1", "--grpc-port=-1"]) == 0
    assert "octavo | SIGTERM: stopping" in capsys.readouterr().err


def test_without_http_the_line_to_try_is_our_own_command(
    pairs: list[ProcessPair], capsys: pytest.CaptureFixture[str]
) -> None:
    when_ready(pairs, lambda pair: kill_self(signal.SIGTERM))
    assert main(["serve", "--port=-1", "--grpc-port=-1"]) == 0
    out = capsys.readouterr().out
    assert "HTTP" not in out
    assert "octavo chat --address unix:" in out


def test_a_second_signal_stops_at_once(
    pairs: list[ProcessPair], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_ROUTER", "stubborn")

    def twice(pair: ProcessPair) -> None:
        kill_self(signal.SIGINT)
        time.sleep(0.05)  # two signals of one kind at once are one
        kill_self(signal.SIGINT)

    when_ready(pairs, twice)
    assert main(["serve", "--port=-1", "--grpc-port=-1"]) == 0
    assert "router says goodbye" not in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_exits_2(
    pairs: list[ProcessPair], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_WORKER", "exit:2:octavo-worker: no model 'm'")
    assert main(["serve", "m"]) == 2
    assert capsys.readouterr().err.endswith("octavo: error: no model 'm'\n")


def test_a_worker_that_keeps_dying_exits_1(pairs: list[ProcessPair], capsys: pytest.CaptureFixture[str]) -> None:
    when_ready(pairs, lambda pair: os.kill(pair.pids()["worker"], signal.SIGKILL))
    assert main(["serve", "--port=-1", "--grpc-port=-1"]) == 1
    assert "octavo: error: the worker died 1 times in a row" in capsys.readouterr().err


def test_a_failure_while_announcing_leaves_nothing_running(
    pairs: list[ProcessPair], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise UnavailableError("gone")

    monkeypatch.setattr("octavo.cli.serve._announce", fail)
    assert main(["serve", "--port=-1", "--grpc-port=-1"]) == 1
    assert "octavo: error: gone" in capsys.readouterr().err
    assert pairs[0].pids() == {}


def test_commands_start_a_server_of_their_own(pairs: list[ProcessPair], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "m", "--message", "hello", "--dtype=float16"]) == 0
    assert main(["generate", "hello", "--model=m", "--no-progress"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith('HELLO\n{"index": 0, "text": "HELLO"')
    assert "--model=m" in captured.err
    assert "--dtype=float16" in captured.err
    assert "--log-level=warning" in captured.err
    assert [pair.pids() for pair in pairs] == [{}, {}]
