"""The worker on a GPU's kernels, without a GPU: see `triton_worker`, which runs in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("case", ["llama", "qwen3-window", "head-dim-80"])
def test_a_worker_on_triton_samples_what_the_oracle_does(case: str) -> None:
    program = subprocess.run(
        [sys.executable, "-m", "tests.worker.triton_worker", case],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    answer = json.loads(program.stdout)
    assert answer["ahead"] == answer["expected"]
    assert answer["plainly"] == answer["expected"]
    assert answer["backend"] == "triton (cpu, interpreted)"
    assert {sequence: len(tokens) for sequence, tokens in answer["ahead"]["tokens"].items()} == {
        "1": 7, "2": 6, "3": 1, "4": 2, "5": 2,
    }  # fmt: skip
    assert "replay 2" in answer["device"]
    assert "replay 4" in answer["device"]
