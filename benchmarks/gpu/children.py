"""Runs groups of parts in processes of their own and puts together what they wrote.

A process whose device is lost, that crashes or that takes too long is started again without what it had tried: what
fails, fails alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOST = 3
"""Exit status of a process whose device is lost."""
_MOST_STARTS = 8


def run_groups(groups: Sequence[Sequence[str]], arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """The results of all groups. arguments: of each process, beside its parts; limit_s: seconds for each."""
    results: dict[str, Any] = {"rows": [], "failures": {}, "tokens_per_s": 0.0}
    for group in groups:
        skipped: list[str] = []
        for _ in range(_MOST_STARTS):
            found, status = _run(group, arguments, skipped, results["tokens_per_s"], limit_s)
            _merge(results, found)
            tried = [name for name in found.get("tried", []) if name not in skipped]
            if status in (0, 1):
                break
            name = tried[-1] if tried else ", ".join(group)
            how = f"took longer than {limit_s:g} s" if status is None else f"ended with {status}"
            results["failures"].setdefault(name, f"its process {how}")
            if not tried:
                break
            skipped += tried
    return results


def _run(
    group: Sequence[str], arguments: Sequence[str], skipped: Sequence[str], tokens_per_s: float, limit_s: float
) -> tuple[dict[str, Any], int | None]:
    """What a process wrote, and its exit status; None if it was stopped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, sys.argv[0], *arguments, "--child", str(path), "--our-rate", str(tokens_per_s)]
        command += [f"--only={part}" for part in group] + [f"--skip={name}" for name in skipped]
        try:
            status: int | None = subprocess.run(command, timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            status = None
        return (json.loads(path.read_text()) if path.exists() else {}), status


def _merge(results: dict[str, Any], found: dict[str, Any]) -> None:
    known = {row["name"] for row in results["rows"]}
    results["rows"] += [row for row in found.get("rows", []) if row["name"] not in known]
    results["failures"].update(found.get("failures", {}))
    results["tokens_per_s"] = found.get("tokens_per_s") or results["tokens_per_s"]
    for name, value in found.items():
        if name not in ("rows", "failures", "tried", "tokens_per_s"):
            results.setdefault(name, value)
