"""One child program of a pair: start it, pass its log on, ask whether it lives, end it.

Knows nothing of what the program does, nor of when to start it again; that is `ProcessPair`'s.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.config import setting_names
from octavo.errors import StartError
from octavo.settings import environment_name

LogSink = Callable[[str, str], None]
"""Takes a program's name and one line of its log, without the line's end."""

_TAIL_LINES = 20
_LOG_END_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class ProgramSpec:
    """What to run: the program's short name in logs, its module for `python -m`, and the distribution that brings
    it.
    """

    name: str
    module: str
    distribution: str


WORKER = ProgramSpec("worker", "octavo_worker", "octavo-worker")
ROUTER = ProgramSpec("router", "octavo_router", "octavo-router")


def check_installed(spec: ProgramSpec) -> None:
    """Raises StartError if the program's module cannot be found by this Python."""
    if importlib.util.find_spec(spec.module) is None:
        raise StartError(
            f"{spec.distribution} is not installed for {sys.executable}; "
            f"install it with: pip install {spec.distribution}",
            exit_code=2,
        )


def child_environment(environ: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child: without the variables of settings, which the parent has already read, but with its
    secret settings, which must not stand among its flags.

    A flag that equals the default is not passed on, and must not be overruled by a variable that the flag overruled.
    """
    read = {environment_name(name) for name in setting_names()}
    kept = {key: value for key, value in environ.items() if key not in read}
    return kept | {"PYTHONUNBUFFERED": "1"} | dict(secrets)


def own_words(spec: ProgramSpec, log: Sequence[str]) -> str:
    """The one line in which a program that exits with 2 says what is wrong; empty if its log is."""
    lines = [line for line in log if line.strip()]
    return lines[-1].removeprefix(f"{spec.distribution}: ").removeprefix("error: ") if lines else ""


class Program:
    """A running child. Its stdout and stderr are one log, passed line by line to `on_log` from a thread of its own."""

    def __init__(
        self, spec: ProgramSpec, arguments: Sequence[str], on_log: LogSink, *, secrets: Mapping[str, str] | None = None
    ) -> None:
        """secrets: environment variables that no other user may see."""
        self.spec = spec
        self._on_log = on_log
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.launch", str(os.getpid()), spec.module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment(os.environ, secrets or {}),
            # A group of its own: the terminal's Ctrl-C goes to the parent alone, which stops its children in order.
            process_group=0,
        )
        self._pump = threading.Thread(target=self._pass_log_on, name=f"octavo-{spec.name}-log", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._process.poll()

    def describe_exit(self) -> str:
        """How it ended, for people: "exited with code 1" or "was killed by SIGKILL"."""
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def last_lines(self) -> list[str]:
        """The end of its log; complete once it has ended."""
        if self._process.returncode is not None:
            self._pump.join(_LOG_END_TIMEOUT_S)
        return list(self._tail)

    def terminate(self) -> None:
        """Asks it to end (SIGTERM). Harmless if it has."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it (SIGKILL). Harmless if it has ended."""
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end and for the end of its log; False if its end has not come within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._pump.join(_LOG_END_TIMEOUT_S)
        return True

    def _pass_log_on(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\r\n")
                self._tail.append(line)
                self._on_log(self.spec.name, line)
