"""A process that loses its device is started again without what it had tried."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu.children import LOST, run_groups

# Tries cases a to e of its part. c loses the device, once and for all; the part "slow" never ends.
_CHILD = f"""
import json, sys, time

arguments = sys.argv[1:]
path = arguments[arguments.index("--child") + 1]
(part,) = [argument.split("=")[1] for argument in arguments if argument.startswith("--only=")]
skipped = [argument.split("=")[1] for argument in arguments if argument.startswith("--skip=")]
found = {{"rows": [{{"name": f"{{part}} rate"}}], "failures": {{}}, "tried": [], "tokens_per_s": 0.0}}
found["backend"] = "fake"
found["given"] = arguments[arguments.index("--our-rate") + 1]

def write():
    with open(path, "w") as file:
        json.dump(found, file)

if part == "crash":
    sys.exit(-11)
for case in "a" if part == "slow" else "abcde":
    name = f"{{part}} {{case}}"
    if name in skipped:
        continue
    found["tried"].append(name)
    write()
    if part == "slow":
        time.sleep(60)
    if part == "lost" and case == "c":
        found["failures"][name] = "CUDA error"
        write()
        sys.exit({LOST})
    found["rows"].append({{"name": name}})
found["tokens_per_s"] = 7.0 if part == "good" else 0.0
write()
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(_CHILD)
    monkeypatch.setattr(sys, "argv", [str(script)])


@pytest.mark.usefixtures("child")
def test_what_loses_the_device_fails_alone() -> None:
    results = run_groups([["lost"], ["good"]], [], 30)
    names = [row["name"] for row in results["rows"]]
    assert names == ["lost rate", "lost a", "lost b", "lost d", "lost e", "good rate", *(f"good {c}" for c in "abcde")]
    assert results["failures"] == {"lost c": "CUDA error"}
    assert (results["tokens_per_s"], results["backend"]) == (7.0, "fake")


@pytest.mark.usefixtures("child")
def test_a_process_that_crashes_or_hangs_is_told() -> None:
    results = run_groups([["crash"], ["slow"]], [], 3)
    assert results["failures"] == {
        "crash": "its process ended with 245",
        "slow a": "its process took longer than 3 s",
    }
