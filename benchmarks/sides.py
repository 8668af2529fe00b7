"""The programs that are compared: each loaded in processes of its own, asked in turns, and idle meanwhile.

A side is started by the harness, which notes how long that takes, and stays loaded. What is asked, and what the answers
mean, is the harness's.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from served import Connection
from stream_clients import Pieces, events, stream_completion

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
START_TIMEOUT_S = 600.0
FIRST_PROMPT = tuple(range(300, 332))

Prompts = Sequence[Sequence[int]]


class SideError(Exception):
    """A side cannot be started, or gave something else than it was asked for; the message says why."""


@dataclass(frozen=True)
class Answer:
    """The seconds that a side took, and what else was measured of it meanwhile."""

    seconds: float
    facts: dict[str, float] = field(default_factory=dict)


class Side(Protocol):
    """A loaded program. start_s: seconds from its process's start to its first answer; about: what it computes in."""

    name: str
    about: str
    versions: dict[str, str]
    start_s: float
    pid: int

    def run(self, prompts: Prompts, num_tokens: int) -> Answer:
        """Generates `num_tokens` tokens behind each prompt, all at once; the seconds until the last one came. Raises
        SideError where it made more or fewer."""

    def close(self) -> None:
        """Ends its processes."""


@dataclass(frozen=True)
class SideSpec:
    """How a side is started. is_ours: whether it is Octavo."""

    name: str
    start: Callable[[], Side]
    is_ours: bool


class PeerSide:
    """Another program in an environment of its own; one of `peers/` is its other end."""

    def __init__(self, name: str, script: Path, python: Path, model: Path, dtype: str, threads: int) -> None:
        self.name = name
        command = [str(python), str(script), f"--model={model}", f"--dtype={dtype}", f"--threads={threads}"]
        self._log = tempfile.TemporaryFile("w+", prefix=f"{name}-")  # noqa: SIM115
        began_at = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.pid = self._process.pid
        hello = self._read()
        self.about: str = hello["about"]
        self.versions: dict[str, str] = hello["versions"]
        self.run([FIRST_PROMPT], 1)
        self.start_s = time.perf_counter() - began_at

    def run(self, prompts: Prompts, num_tokens: int) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer["num_tokens"] != num_tokens * len(prompts):
            raise SideError(f"{self.name} generated {answer['num_tokens']} tokens, not {num_tokens * len(prompts)}")
        return Answer(answer["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            last_words = "".join(self._log.readlines()[-12:])
            raise SideError(f"{self.name} ended with code {code}; the end of its log:\n{last_words}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class OctavoSide:
    """`octavo serve`: a router and a worker, asked over gRPC with one stream a prompt, or over HTTP."""

    def __init__(self, name: str, model: Path, settings: dict[str, Any]) -> None:
        self.name = name
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "octavo.cli", "serve", str(model), "--port=0", "--grpc-port=0", *flags]
        began_at = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.pid = self._process.pid
        self.log: list[str] = []
        addresses = self._addresses()
        threading.Thread(target=self._keep_log, daemon=True).start()
        self._http = addresses["HTTP"].removesuffix("/v1")
        self._connection = Connection(addresses["gRPC"])
        self.versions = self._connection.versions
        self._ask([FIRST_PROMPT], 1)
        self.start_s = time.perf_counter() - began_at
        with urllib.request.urlopen(f"{self._http}/v1/models") as response:
            self._model = json.load(response)["data"][0]["id"]
        computing = [line.partition("computing in ")[2] for line in self.log if "computing in " in line]
        self.about = computing[0] if computing else ""

    def _addresses(self) -> dict[str, str]:
        """What `octavo serve` prints once it serves. Raises SideError if it ends before."""
        assert self._process.stdout is not None
        found: dict[str, str] = {}
        for line in self._process.stdout:
            self.log.append(line.rstrip("\n"))
            if match := re.match(r"  (HTTP|gRPC) +(\S+)$", line):
                found[match[1]] = match[2]
            if len(found) == 2:
                return found
        last_words = "\n".join(self.log[-12:])
        raise SideError(f"{self.name} ended with code {self._process.wait()}; the end of its log:\n{last_words}")

    def _keep_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line.rstrip("\n"))

    def run(self, prompts: Prompts, num_tokens: int) -> Answer:
        before = self._step_seconds()
        seconds = self._ask(prompts, num_tokens)
        busy_s, gap_s = (after - at_first for after, at_first in zip(self._step_seconds(), before, strict=True))
        return Answer(seconds, {"idle_share": gap_s / (busy_s + gap_s)})

    def _ask(self, prompts: Prompts, num_tokens: int) -> float:
        async def ask_all() -> tuple[float, set[int]]:
            begin = time.perf_counter()
            done = await asyncio.gather(*(self._connection.ask(prompt, num_tokens) for prompt in prompts))
            return time.perf_counter() - begin, {running.num_received for running in done}

        seconds, counts = self._connection.run(ask_all())
        if counts != {num_tokens}:
            raise SideError(f"{self.name} generated {sorted(counts)} tokens a prompt instead of {num_tokens}")
        return seconds

    def run_http(self, prompts: Prompts, num_tokens: int) -> tuple[Answer, bytes]:
        """The same over HTTP with server-sent events. Returns an event in the middle of a stream as well."""

        async def ask_all() -> tuple[float, list[Pieces]]:
            fields = {"model": self._model, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
            options = {"stream_options": {"include_usage": True}}
            bodies = [{"prompt": list(prompt), **fields, **options} for prompt in prompts]
            begin = time.perf_counter()
            streams = await asyncio.gather(*(stream_completion(self._http, body) for body in bodies))
            return time.perf_counter() - begin, streams

        began_cpu_s = time.process_time()
        seconds, streams = self._connection.run(ask_all())
        clients_cores = (time.process_time() - began_cpu_s) / seconds
        received = [[event for _, event in events(pieces)] for pieces in streams]
        counts = {stream[-1].get("usage", {}).get("completion_tokens") for stream in received}
        if counts != {num_tokens}:
            raise SideError(f"{self.name} generated {sorted(map(str, counts))} tokens a prompt instead of {num_tokens}")
        pieces = streams[0]
        per_event = num_tokens * len(prompts) / sum(len(stream) - 1 for stream in received)
        facts = {"clients_cores": clients_cores, "tokens_per_event": per_event}
        return Answer(seconds, facts), pieces[len(pieces) // 2][1]

    def _step_seconds(self) -> tuple[float, float]:
        """Seconds that the worker has spent in steps, and between them, so far: both measured on the worker."""
        with urllib.request.urlopen(f"{self._http}/metrics") as response:
            text = response.read().decode()
        names = ("octavo_step_duration_seconds_sum", "octavo_worker_gap_seconds_total")
        busy_s, gap_s = (float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0]) for name in names)
        return busy_s, gap_s

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait()
