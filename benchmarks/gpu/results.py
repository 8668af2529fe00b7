"""The file that a run leaves: what its processes have written so far, put together.

It is written again and again, so that it is there whatever ends the run. Who writes what a process measures is
`gpu.run`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any


class Results:
    """path: of the file; log: of everything that was printed."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        """folder: is made if it is not there; facts: what the run is of."""
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self.path, self.log = folder / f"gpu-{stamp}.json", folder / f"gpu-{stamp}.log"
        self._parts = folder / f"gpu-{stamp}-parts"
        self._parts.mkdir()
        self._facts = facts
        self._sources: list[Path] = []
        self._failures: dict[str, str] = {}
        self.write()

    def new_source(self) -> Path:
        """Where another process writes its results; they stand behind those of the ones before."""
        self._sources.append(self._parts / f"{len(self._sources):02d}.json")
        return self._sources[-1]

    def fail(self, name: str, why: str) -> None:
        """Something was not measured; what a process itself says of it goes first."""
        self._failures.setdefault(name, why)

    def merged(self) -> dict[str, Any]:
        """rows, failures and tokens_per_s of all, and their facts, of which the first to tell one is believed."""
        results: dict[str, Any] = {**self._facts, "rows": [], "failures": dict(self._failures), "tokens_per_s": 0.0}
        known: set[str] = set()
        for found in map(read, self._sources):
            results["rows"] += [row for row in found.pop("rows", []) if row["name"] not in known]
            known = {row["name"] for row in results["rows"]}
            results["failures"].update(found.pop("failures", {}))
            results["tokens_per_s"] = found.pop("tokens_per_s", 0.0) or results["tokens_per_s"]
            for name in found.keys() - {"tried", "is_finished"}:
                results.setdefault(name, found[name])
        return results

    def write(self) -> dict[str, Any]:
        """The file, as things stand. Returns what is in it."""
        merged = self.merged()
        write_json(self.path, merged)
        return merged

    def close(self) -> dict[str, Any]:
        """The same at the run's end: what the processes wrote by themselves is not needed any more."""
        merged = self.write()
        shutil.rmtree(self._parts, ignore_errors=True)  # a process that cannot be ended may still write
        return merged


def read(path: Path) -> dict[str, Any]:
    """What a process has written; nothing where it has not."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """All of it or nothing: whoever reads meanwhile finds what was there before."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(unfinished, path)
