"""How many cores this process may really use: its affinity, hardware threads counted once, and its cgroup's quota."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that the scheduler lets this process run on, at least 1. `root` is where /sys and /proc lie."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core_of(root, cpu) for cpu in cpus}
    quota = cgroup_quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """CPU time per wall time that the process's cgroup allows, the tightest of its ancestors; None without a limit."""
    quotas = [_quota_v2(folder) for folder in _cgroup_folders(root, "")]
    quotas += [_quota_v1(folder) for folder in _cgroup_folders(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _core_of(root: Path, cpu: int) -> str:
    siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return siblings if siblings is not None else str(cpu)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The process's cgroup and its ancestors; controller "" means the unified hierarchy."""
    mount = root / "sys/fs/cgroup" / controller
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            return [mount / parent for parent in (group, *group.parents)]
    return []


def _quota_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else float(words[0]) / float(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota = float(_read(folder / "cpu.cfs_quota_us") or -1)
    period = float(_read(folder / "cpu.cfs_period_us") or 100_000)
    return None if quota <= 0 else quota / period


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
