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
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("llama", {}),
        ("qwen3-window", {}),
        ("head-dim-80", {}),
        ("llama", {"kv_cache_dtype": "fp8_e4m3"}),
        ("llama-biases", {"quantization": "fp8", "kv_cache_dtype": "int8"}),
        ("llama-tied", {"quantization": "int4"}),
    ],
)
def test_a_worker_on_triton_samples_what_the_oracle_does(case: str, settings: dict[str, str]) -> None:
    given = [f"{name}={value}" for name, value in settings.items()]
    program = subprocess.run(
        [sys.executable, "-m", "tests.worker.triton_worker", case, *given],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    answer, quantization = json.loads(program.stdout), [settings[key] for key in settings if key == "quantization"]
    assert answer["ahead"] == answer["expected"]
    assert answer["plainly"] == answer["expected"]
    assert answer["backend"] == ", ".join(["triton (cpu, interpreted)", *quantization])
    assert answer["kv_dtype"] == settings.get("kv_cache_dtype", "float32")
    assert {sequence: len(tokens) for sequence, tokens in answer["ahead"]["tokens"].items()} == {
        "1": 7, "2": 6, "3": 1, "4": 2, "5": 2,
    }  # fmt: skip
    assert "replay 2" in answer["device"]
    assert "replay 4" in answer["device"]
