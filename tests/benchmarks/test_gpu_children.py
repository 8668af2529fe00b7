"""A process that loses its device, crashes or hangs is told and started again without what it had tried, and what was
measured is in the file at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu import children
from gpu.children import LOST, run_jobs
from gpu.groups import Job
from gpu.results import Results

# Tries cases a to e of its part. c loses the device of "lost", once and for all; "slow" never ends; "mute" and "crash"
# end before they have written anything.
_CHILD = f"""
import json, os, sys, time

arguments = sys.argv[1:]
path = arguments[arguments.index("--child") + 1]

def given(name):
    return [argument.split("=")[1] for argument in arguments if argument.startswith(f"--{{name}}=")]

(part,), skipped = given("only"), given("skip")
found = {{"rows": [{{"name": f"{{part}} rate"}}], "failures": {{}}, "tried": [], "tokens_per_s": 0.0}}
found["backend"], found["given"] = "fake", given("our-rate")[0]

def write():
    with open(path + ".new", "w") as file:
        json.dump(found, file)
    os.replace(path + ".new", path)

if part == "crash":
    os.abort()
if part == "mute":
    raise RuntimeError("CUDA initialization failed")
for case in "a" if part == "slow" else "abcde":
    name = f"{{part}} {{case}}"
    if name in skipped:
        continue
    found["tried"].append(name)
    write()
    if part == "slow":
        time.sleep(60)
    if part == "lost" and case == "c":
        found["failures"][name] = "the driver's words"
        write()
        sys.exit({LOST})
    found["rows"].append({{"name": name}})
found["tokens_per_s"] = 7.0 if part == "good" else 0.0
found["is_finished"] = True
write()
"""


@pytest.fixture(autouse=True)
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(_CHILD)
    monkeypatch.setattr(sys, "argv", [str(script)])


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "out", {"of": "a test"})


def run(results: Results, *parts: str, limit_s: float = 30.0, stall_s: float = 30.0) -> None:
    run_jobs([Job(part, (part,)) for part in parts], [], results, limit_s=limit_s, stall_s=stall_s)


def test_what_loses_the_device_fails_alone(results: Results) -> None:
    run(results, "lost")
    run(results, "good")
    found = json.loads(results.path.read_text())
    names = [row["name"] for row in found["rows"]]
    assert names == ["lost rate", "lost a", "lost b", "lost d", "lost e", "good rate", *(f"good {c}" for c in "abcde")]
    assert found["failures"] == {"lost c": "the driver's words"}
    assert (found["tokens_per_s"], found["backend"], found["of"], found["given"]) == (7.0, "fake", "a test", "0.0")


def test_a_process_that_ends_before_its_first_case_is_a_failure_with_its_last_words(results: Results) -> None:
    run(results, "mute", "crash")
    failures = results.merged()["failures"]
    assert failures["mute"].startswith("its process, before its first case, ended with 1. Its last lines: Traceback")
    assert failures["mute"].endswith("RuntimeError: CUDA initialization failed")
    assert failures["crash"] == "its process, before its first case, was ended by SIGABRT"
    assert "CUDA initialization failed" in results.log.read_text()


def test_a_process_from_which_nothing_comes_is_stopped(results: Results) -> None:
    run(results, "slow", "good", stall_s=0.5)
    found = results.merged()
    assert found["failures"] == {"slow a": "its process was stopped: nothing came of it for 0.5 s"}
    assert "good e" in {row["name"] for row in found["rows"]}


def test_a_group_ends_when_its_time_is_over(results: Results) -> None:
    run(results, "slow", limit_s=1.0)
    found = json.loads(results.path.read_text())
    assert found["failures"] == {"slow a": "its process took longer than 1 s; what comes behind it is not measured"}
    assert [row["name"] for row in found["rows"]] == ["slow rate"]


def test_what_is_measured_is_in_the_file_before_the_group_ends(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the run, here an exception from the loop that waits, takes nothing with it, and leaves no process."""

    class StoppedError(Exception):
        pass

    def stop(_: float) -> None:
        if list(results.path.parent.glob("*-parts/00.json")):
            monkeypatch.undo()
            raise StoppedError

    monkeypatch.setattr(children.time, "sleep", stop)
    with pytest.raises(StoppedError):
        run(results, "slow")
    assert [row["name"] for row in json.loads(results.path.read_text())["rows"]] == ["slow rate"]
    assert subprocess.run(["pgrep", "-f", str(results.path.parent)], check=False, capture_output=True).stdout == b""


def test_the_script_leaves_its_results_and_tables_when_it_is_stopped(tmp_path: Path) -> None:
    root, out = Path(__file__).parents[2], tmp_path / "out"
    # A peer that is never there: the process hangs as a kernel might, behind the first rows.
    (tmp_path / "transformers.py").write_text(
        "__version__ = '5.0'\nimport sys, time\nif '--child' in sys.argv: time.sleep(90)"
    )
    arguments = ["--device", "cpu", "--tiny", "--kernel-backend", "reference", "--only", "peer", "--out", str(out)]
    program = subprocess.Popen(
        [sys.executable, "benchmarks/bench_gpu.py", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = "4 requests of 12 + 5 tokens"
    deadline = time.monotonic() + 120
    while not any(rows in path.read_text() for path in out.glob("gpu-*-parts/*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    program.send_signal(signal.SIGTERM)
    output, _ = program.communicate(timeout=60)
    assert program.returncode == 1
    (path,) = out.glob("gpu-*.json")
    found = json.loads(path.read_text())
    assert rows in {row["name"] for row in found["rows"]}
    assert found["failures"]["the run"] == "stopped by SIGTERM before it was through"
    assert f"| {rows} " in output
    assert f"written to {path}" in output
