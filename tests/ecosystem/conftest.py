"""A served pair for clients that know nothing of us.

These tests run in an environment of their own, with other people's clients and without our packages (`make
test-ecosystem`): the server is a process of the product's environment, as it would be for anybody.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What `octavo serve` prints when it is ready.
_SAID = re.compile(r"^  HTTP  (?P<http>http\S+)/v1\n  gRPC  (?P<grpc>\S+)\n", re.MULTILINE)
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0


def octavo_python() -> str:
    """The interpreter that has the product: OCTAVO_PYTHON, else the repository's environment, else this one."""
    ours = ROOT / ".venv" / "bin" / "python"
    return os.environ.get("OCTAVO_PYTHON") or (str(ours) if ours.exists() else sys.executable)


@dataclass(frozen=True)
class Served:
    """Where a pair is reached. http: a base URL without a path; grpc: HOST:PORT; log: its output's file."""

    http: str
    grpc: str
    log: Path


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """The default model in fp32."""
    with serve("--dtype=float32", "--chat-template=hermes") as served:
        yield served


@contextmanager
def serve(*flags: str) -> Iterator[Served]:
    """`octavo serve` with flags on free ports, for the length of a with block."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [octavo_python(), "-m", "octavo.cli", "serve", "--port=0", "--grpc-port=0", *flags]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        try:
            yield _addresses(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            finally:
                process.kill()


def _addresses(process: subprocess.Popen[bytes], log: Path) -> Served:
    """Where the server says that it serves, once it does."""
    end = time.monotonic() + START_TIMEOUT_S
    while not (said := _SAID.search(log.read_text())):
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.05)
    return Served(said["http"], said["grpc"], log)
