"""Processes and what they have started: the CPU time they take, and halting them while others are measured. Linux."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path


def family(pid: int) -> list[int]:
    """The process and all that came of it and still runs, oldest first; empty where the system does not tell."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop(0)
        found.append(parent)
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                waiting += map(int, task.read_text().split())
            except OSError:  # it has ended meanwhile
                continue
    return [member for member in found if Path(f"/proc/{member}").exists()]


def cpu_s(pids: Sequence[int]) -> float:
    """Seconds of CPU time that they have taken together; those that have ended count as none."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_share(pid: int, seconds: float) -> float:
    """Cores that a process and what it started keep busy, measured over so many seconds."""
    members = family(pid)
    before = cpu_s(members)
    time.sleep(seconds)
    return (cpu_s(members) - before) / seconds


def resident_gib(pid: int) -> float:
    """GiB of memory that a process and what it started hold; pages that they share count more than once."""
    pages = 0
    for member in family(pid):
        try:
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 30)


def halt(pid: int) -> None:
    """Stops a process and what it started until `go_on`."""
    _signal(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    """Lets what was halted run again."""
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    for member in family(pid):
        try:
            os.kill(member, number)
        except ProcessLookupError:
            continue
