"""What a start on Triton's kernels compiles is all that steps launch: see `triton_variants`, a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True, "quantization": "int4"},
        {"enforce_eager": True, "quantization": "int8", "kv_cache_dtype": "int8"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
    ],
)
def test_no_step_waits_for_a_compiler(settings: dict[str, Any]) -> None:
    program = subprocess.run(
        [sys.executable, "-m", "tests.worker.triton_variants", json.dumps(settings)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    answer = json.loads(program.stdout)
    assert answer["late"] == {}
    assert answer["prepared"] >= 15
