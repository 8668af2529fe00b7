"""Runs jobs in processes of their own, and sees to it that what fails, fails alone.

A process whose device is lost, that crashes, or from which nothing comes any more is started again without what it had
tried; what ends before it has tried anything is a failure too. What they measure goes into their own files
(`gpu.results`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from gpu.groups import Job
from gpu.results import Results, read

LOST = 3
"""Exit status of a process whose device is lost."""
STALL_S = 120.0
"""A process that neither prints nor writes for so long hangs: compiling a kernel takes half a minute at most."""
_MOST_STARTS = 8
_MOST_BARREN_STARTS = 3  # in a row, in which nothing new was measured
_MOST_MUTE_STARTS = 2  # the same, where not even a first case was reached
_SHORTEST_S = 5.0  # a process needs more to begin
_LAST_LINES = 8
_print_lock = threading.Lock()


def run_jobs(
    jobs: Sequence[Job], arguments: Sequence[str], results: Results, *, limit_s: float, stall_s: float = STALL_S
) -> None:
    """Runs jobs at the same time, until all are over or limit_s seconds have passed. The results are written
    meanwhile, and at the end, whatever ends it. arguments: of each process, beside what the job says."""
    ends_at = time.monotonic() + limit_s
    lanes = [_Lane(job, [*arguments, f"--limit-s={limit_s:.0f}"], results, limit_s, ends_at, stall_s) for job in jobs]
    written_at = time.monotonic()
    try:
        for lane in lanes:
            lane.start()
        while [lane for lane in lanes if lane.goes_on()]:
            time.sleep(0.05)
            if time.monotonic() - written_at > 2.0:
                results.write()
                written_at = time.monotonic()
    finally:
        results.write()  # first: whoever ends the run may not wait for long
        for lane in lanes:
            lane.stop()


class _Lane:
    """One job: its process, and those that are started in its place."""

    def __init__(
        self, job: Job, arguments: Sequence[str], results: Results, limit_s: float, ends_at: float, stall_s: float
    ) -> None:
        self._job, self._arguments, self._results = job, arguments, results
        self._limit_s, self._ends_at, self._stall_s = limit_s, ends_at, stall_s
        self._skipped: list[str] = []
        self._known: set[str] = set()
        self._num_starts = self._num_barren = 0
        self._child: _Child | None = None

    def start(self) -> None:
        """Starts a process, without what was tried."""
        command = [*self._arguments, f"--shard={self._job.shard}/{self._job.of}"]
        command += [f"--our-rate={self._results.merged()['tokens_per_s']}"]
        command += [f"--only={part}" for part in self._job.parts] + [f"--skip={name}" for name in self._skipped]
        self._num_starts += 1
        self._child = _Child(command, self._results.new_source(), self._results.log)

    def goes_on(self) -> bool:
        """Looks after the process. Returns whether there is one any more."""
        child = self._child
        if child is None:
            return False
        status = child.status()
        if status is not None:
            found = child.found()
            if status in (0, 1) and found.get("is_finished"):
                self._child = None
            else:
                lines = " / ".join(child.last_lines())
                self._end(child, _ended(status) + (f". Its last lines: {lines}" if lines else ""))
        elif time.monotonic() > self._ends_at:
            child.kill(and_tell=True)
            self._end(child, f"took longer than {self._limit_s:.0f} s; what comes behind it is not measured")
        elif child.silent_s() > self._stall_s:
            child.kill(and_tell=True)
            self._end(child, f"was stopped: nothing came of it for {self._stall_s:g} s")
        return self._child is not None

    def stop(self) -> None:
        """Ends the process, if it still runs."""
        if self._child is not None:
            self._child.kill(and_tell=False)
            self._child = None

    def _end(self, child: _Child, how: str) -> None:
        """Tells of a process that ended before it was through, and starts another one if that may bring more."""
        self._child = None
        found = child.found()
        tried = [name for name in found.get("tried", []) if name not in self._skipped]
        new = {row["name"] for row in found.get("rows", [])} - self._known
        before = "" if tried else ", before its first case,"
        self._results.fail(tried[-1] if tried else self._job.name, f"its process{before} {how}")
        self._skipped += tried
        self._known |= new
        self._num_barren = 0 if new else self._num_barren + 1
        most_barren = _MOST_BARREN_STARTS if tried else _MOST_MUTE_STARTS
        if self._num_starts == _MOST_STARTS or self._num_barren >= most_barren:
            self._results.fail(self._job.name, "given up after several processes that ended early")
        elif self._ends_at - time.monotonic() > _SHORTEST_S:
            self.start()


class _Child:
    """A process that measures. What it prints is shown, kept in the log, and its end remembered."""

    def __init__(self, arguments: Sequence[str], path: Path, log: Path) -> None:
        self._path, self._log = path, log
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._written_at = 0
        self._heard_at = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, sys.argv[0], *arguments, "--child", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # it ends with whatever it has started, and when we say so
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._reader.join(2.0)
        return status

    def silent_s(self) -> float:
        """Seconds since it last printed or wrote."""
        written_at = self._path.stat().st_mtime_ns if self._path.exists() else 0
        if written_at != self._written_at:
            self._written_at, self._heard_at = written_at, time.monotonic()
        return time.monotonic() - self._heard_at

    def found(self) -> dict:  # type: ignore[type-arg]
        """What it has written."""
        return read(self._path)

    def last_lines(self) -> list[str]:
        """Of what it printed."""
        return [line for line in (line.strip() for line in self._lines) if line]

    def kill(self, *, and_tell: bool) -> None:
        """Ends it, with all that it has started. and_tell: it first prints where its threads are."""
        if and_tell and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            print(f"process {self._process.pid} does not end; it may still hold the device", flush=True)
        self._reader.join(2.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                self._heard_at = time.monotonic()
                self._lines.append(line)
                with _print_lock:
                    print(line, end="", flush=True)
                    log.write(line)
                    log.flush()


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
