"""Starts a worker and a router on this machine, joined by a Unix socket, and keeps both alive.

One thread supervises: it starts both children, tells when they serve, starts one again that dies, and stops both in
order. It speaks no gRPC but the health check, and imports neither program; `octavo serve` and `LLM` both stand on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.channel import is_serving
from octavo.config import RouterConfig, WorkerConfig
from octavo.errors import ConfigError, OctavoError, StartError
from octavo.program import ROUTER, WORKER, LogSink, Program, ProgramSpec, check_installed, own_words
from octavo.settings import Settings

_MAX_SOCKET_PATH_BYTES = 104  # sun_path: 108 on Linux, 104 on BSD and macOS, with the final zero
_STARTING_TICK_S = 0.02
_RUNNING_TICK_S = 0.1
_WORKER_STOP_TIMEOUT_S = 10.0
_ROUTER_STOP_MARGIN_S = 5.0


@dataclass(frozen=True)
class Endpoints:
    """Where the pair serves. grpc: an address for `Client`. http: a base URL, empty where no HTTP is served. local: the
    gRPC address on this machine, a Unix socket, which is never encrypted.
    """

    grpc: str
    http: str
    local: str


@dataclass(frozen=True)
class RestartPolicy:
    """When a program that died is started again.

    The first restart comes after `first_delay_s`, each further one after twice the delay, up to `max_delay_s`. A
    program that dies within `fast_death_s` of its start `max_fast_deaths` times in a row is given up. All times in
    seconds.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 8.0
    fast_death_s: float = 30.0
    max_fast_deaths: int = 5


class _Supervised:
    """One of the two programs with the record of its deaths."""

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec
        self.flags: list[str] = []
        self.secrets: dict[str, str] = {}
        self.program: Program | None = None
        self.started_at = 0.0
        self.fast_deaths = 0
        self.restart_at: float | None = None

    def start(self, on_log: LogSink) -> None:
        self.restart_at = None
        self.started_at = time.monotonic()
        self.program = Program(self.spec, self.flags, on_log, secrets=self.secrets)

    def configure(self, config: Settings) -> None:
        """Sets what the program is started with from now on."""
        self.flags, self.secrets = config.to_flags(), config.to_environment()

    def note_death(self, policy: RestartPolicy) -> float | None:
        """Records a death; returns the delay until the restart, None if the program is to be given up."""
        now = time.monotonic()
        self.fast_deaths = self.fast_deaths + 1 if now - self.started_at < policy.fast_death_s else 1
        if self.fast_deaths >= policy.max_fast_deaths:
            return None
        delay = min(policy.first_delay_s * 2.0 ** (self.fast_deaths - 1), policy.max_delay_s)
        self.program, self.restart_at = None, now + delay
        return delay


class ProcessPair:
    """A worker and a router as child processes.

        with ProcessPair(WorkerConfig(), RouterConfig()) as pair:
            endpoints = pair.wait_ready()

    The pair decides itself how the two find each other: `listen`, `worker` and `ready_file` of the settings are
    overruled, and without a `worker_token` they get one that nobody else knows. `on_log` gets every line of both logs
    and the pair's own, named "octavo". `on_end` is called once, from the supervising thread, when the pair has stopped:
    with None after `stop`, else with the error that ended it.
    """

    def __init__(
        self,
        worker: WorkerConfig,
        router: RouterConfig,
        *,
        on_log: LogSink,
        on_ready: Callable[[Endpoints], None] = lambda endpoints: None,
        on_end: Callable[[OctavoError | None], None] = lambda error: None,
        policy: RestartPolicy | None = None,
        programs: tuple[ProgramSpec, ProgramSpec] = (WORKER, ROUTER),
    ) -> None:
        for spec in programs:
            check_installed(spec)
        self._policy = policy or RestartPolicy()
        self._on_log, self._on_ready, self._on_end = on_log, on_ready, on_end
        self._folder = _socket_folder()
        self._ready_file = self._folder / "ready.json"
        router_socket = router.grpc_socket or str(self._folder / "router.sock")
        self._grpc_address = f"unix:{router_socket}"
        worker_address = f"unix:{self._folder / 'worker.sock'}"
        if not (worker.worker_token or worker.worker_token_file):
            token = secrets.token_urlsafe(32)
            worker = dataclasses.replace(worker, worker_token=token)
            router = dataclasses.replace(router, worker_token=token)
        self._worker_config = dataclasses.replace(worker, listen=worker_address)
        self._router_config = dataclasses.replace(
            router,
            worker=(worker_address,),
            grpc_socket=router_socket,
            ready_file=str(self._ready_file),
        )
        self._worker, self._router = _Supervised(programs[0]), _Supervised(programs[1])
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self._at_once = False
        self._endpoints: Endpoints | None = None
        self._error: OctavoError | None = None
        # All children are started by this thread: they die with the thread that started them (see `launch`).
        self._thread = threading.Thread(target=self._supervise, name="octavo-supervisor", daemon=True)
        self._thread.start()

    @property
    def error(self) -> OctavoError | None:
        """What ended the pair, if it ended by itself."""
        return self._error

    def pids(self) -> dict[str, int]:
        """The process ids of the programs that run now, by name."""
        pairs = ((child.spec.name, child.program) for child in (self._worker, self._router))
        return {name: program.pid for name, program in pairs if program is not None}

    def wait_ready(self, timeout_s: float | None = None) -> Endpoints:
        """Waits until the router serves. Raises StartError if a program ends first or the time passes."""
        if not self._settled.wait(timeout_s):
            raise StartError(f"worker and router are not ready after {timeout_s:g} s")
        if self._endpoints is None:
            raise self._error or StartError("stopped before worker and router were ready")
        return self._endpoints

    def stop(self, *, at_once: bool = False) -> None:
        """Stops the router, which finishes its running requests within its grace period, then the worker; waits for
        both.

        `at_once` skips the grace, also of a stop that is under way. Idempotent.
        """
        self.begin_stop(at_once=at_once)
        self._ended.wait()

    def begin_stop(self, *, at_once: bool = False) -> None:
        """As `stop`, without waiting."""
        self._stopping = True
        self._at_once = self._at_once or at_once
        self._wake.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Below: the supervising thread.

    def _supervise(self) -> None:
        try:
            self._start()
            while not self._stopping:
                self._wake.wait(_STARTING_TICK_S if self._endpoints is None else _RUNNING_TICK_S)
                self._check_children()
                if self._endpoints is None and not self._stopping:
                    self._check_ready()
        except OctavoError as error:
            self._error = error
        except OSError as error:
            self._error = StartError(f"cannot start worker and router: {error}")
        finally:
            self._stop_children()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._settled.set()
            self._ended.set()
            self._on_end(self._error)

    def _start(self) -> None:
        self._worker.configure(self._worker_config)
        self._router.configure(self._router_config)
        # Both at once: the router waits for its worker, and importing takes each its time.
        self._worker.start(self._on_log)
        self._router.start(self._on_log)

    def _check_ready(self) -> None:
        """Sets the endpoints once the router has written its addresses and says that it serves."""
        try:
            addresses = json.loads(self._ready_file.read_text())
        except (OSError, ValueError):  # not there, or half written
            return
        if not is_serving(self._grpc_address, timeout_s=1.0):
            return
        http, grpc = addresses.get("http") or "", addresses.get("grpc") or ""
        self._keep_ports(http, grpc)
        serves_tcp = self._router_config.grpc_port >= 0
        self._endpoints = Endpoints(
            grpc=grpc if serves_tcp else self._grpc_address, http=http, local=self._grpc_address
        )
        self._settled.set()
        self._on_ready(self._endpoints)

    def _keep_ports(self, http: str, grpc: str) -> None:
        """A router that is started again must be found at the ports that the first one drew."""
        config = self._router_config
        if config.port == 0 and http:
            config = dataclasses.replace(config, port=int(http.rpartition(":")[2]))
        if config.grpc_port == 0 and grpc:
            config = dataclasses.replace(config, grpc_port=int(grpc.rpartition(":")[2]))
        self._router_config = config
        self._router.configure(config)

    def _check_children(self) -> None:
        for child in (self._worker, self._router):
            if child.program is not None and child.program.exit_code() is not None and not self._stopping:
                self._take_death(child, child.program)
            if child.restart_at is not None and time.monotonic() >= child.restart_at and not self._stopping:
                self._log(f"starting the {child.spec.name} again")
                child.start(self._on_log)

    def _take_death(self, child: _Supervised, program: Program) -> None:
        """Plans the restart of a program that died. Raises the error that ends the pair where there is to be none."""
        code = program.exit_code()
        if self._endpoints is None or code == 2:
            raise _death_error(program)
        delay = child.note_death(self._policy)
        if delay is None:
            raise StartError(
                f"the {child.spec.name} died {child.fast_deaths} times in a row soon after its start; giving up. "
                f"Last: it {program.describe_exit()}{_log_end(program)}",
                exit_code=code,
            )
        self._log(f"the {child.spec.name} {program.describe_exit()}; starting it again in {delay:g} s")

    def _stop_children(self) -> None:
        """Router first, so that running requests finish; then the worker."""
        grace_s = self._router_config.grace_period_s + _ROUTER_STOP_MARGIN_S
        for child, seconds in ((self._router, grace_s), (self._worker, _WORKER_STOP_TIMEOUT_S)):
            self._stop_child(child, seconds)
            child.program = None

    def _stop_child(self, child: _Supervised, grace_s: float) -> None:
        program = child.program
        if program is None or program.exit_code() is not None:
            return
        # Before anything is served there is nothing to finish, and a program that is still importing cannot listen.
        grace_s = grace_s if self._endpoints is not None else min(grace_s, 2.0)
        program.terminate()
        ends_at = time.monotonic() + grace_s
        while not program.wait(_RUNNING_TICK_S):
            if self._at_once or time.monotonic() >= ends_at:
                if not self._at_once:
                    self._log(f"the {child.spec.name} has not stopped within {grace_s:g} s; killing it")
                program.kill()
                program.wait(_WORKER_STOP_TIMEOUT_S)
                return

    def _log(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the supervision
            self._on_log("octavo", line)


def _socket_folder() -> Path:
    """A new private folder whose sockets' paths are short enough for the system."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(f"{parent}/octavo-xxxxxxxx/router.sock")) < _MAX_SOCKET_PATH_BYTES and os.path.isdir(parent):
            return Path(tempfile.mkdtemp(prefix="octavo-", dir=parent))
    raise ConfigError(
        f"the path of the temporary folder {tempfile.gettempdir()!r} is too long for a Unix socket; "
        "set TMPDIR to a shorter one"
    )


def _death_error(program: Program) -> StartError:
    """The error for a program that ended before it served: a usage error in its own words, else the end of its log."""
    code = program.exit_code()
    if code == 2 and (words := own_words(program.spec, program.last_lines())):
        return StartError(words, exit_code=2)
    name = program.spec.name
    return StartError(f"the {name} {program.describe_exit()} before it was ready{_log_end(program)}", exit_code=code)


def _log_end(program: Program) -> str:
    lines = program.last_lines()
    return ". The end of its log:\n" + "\n".join(f"  {line}" for line in lines) if lines else "; it logged nothing"
