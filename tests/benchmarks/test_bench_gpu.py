"""The GPU's benchmark runs before it meets a GPU: a tiny model on the CPU, every part but the one that needs
transformers. What it measures means nothing here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.groups import PART_NAMES

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """The results of a run of the script."""
    program = subprocess.run(
        [sys.executable, "benchmarks/bench_gpu.py", "--device", "cpu", "--tiny", "--out", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stdout + program.stderr
    (path,) = folder.glob("gpu-*.json")
    assert f"written to {path}" in program.stdout
    results: dict[str, Any] = json.loads(path.read_text())
    assert results["failures"] == {}
    return results


def test_every_part_measures_something(tmp_path: Path) -> None:
    parts = [f"--only={part}" for part in PART_NAMES if part != "peer"]
    results = run(tmp_path, "--kernel-backend", "reference", *parts)
    assert results["backend"].startswith("reference")
    assert results["rates"]["bytes_per_s"] > 0
    rows = {row["name"].strip(): row for row in results["rows"]}
    for name in (
        "rms_norm, bfloat16: equal",
        "advance_decode, float32: equal",
        "attention, decode, 3 x 40",
        "attention, decode, 3 x 40, KV of e4m3",
        "linear, qkv, 1 rows",
        "linear, output with residual, 3 rows",
        "linear, head, 3 rows",
        "int8_linear, gate and up, 3 rows",
        "rotary_write_kv, 16 tokens",
        "ban_tokens, 3 rows",
        "copy_blocks, 32 of 8 KiB",
        "advance_decode, 3 x 3 blocks",
        "decode step, 3 x 40",
        "without work between steps, 3 x 40",
        "prompt of 32 tokens",
        "swap in: equal",
        "swap in, 4 blocks of 8 KiB",
        "4 requests of 12 + 5 tokens",
    ):
        assert rows[name]["value"] >= 0
    assert rows["decode step, 3 x 40"]["ratio"] > 0
    assert rows["decode step, 1 x 40"]["at_most"] == 1.25
    assert results["preflight"]["versions"]["protobuf"]
    assert rows["decode step, 3 x 40"]["facts"]["floor_s"] > 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_of_the_gpu_equal_the_oracle(tmp_path: Path) -> None:
    parts = ("--only", "equality", "--only", "dtypes", "--processes", "2")
    results = run(tmp_path, "--kernel-backend", "triton", *parts, TRITON_INTERPRET="1")
    assert results["backend"] == "triton (cpu, interpreted)"
    names = {row["name"].partition(":")[0] for row in results["rows"]}
    heads = (f"attention, {kind}, heads of {size}" for kind in ("decode", "chunks") for size in (64, 80, 96, 256))
    ops = ("linear of 4 bits, 1 rows", "attention, decode, KV of e4m3", "advance_decode", *heads)
    assert {f"{op}, bfloat16" for op in ops} <= names
    # What nobody asks for in fp32, and takes a compiler long, is left out there.
    assert {op for op in ops if f"{op}, float32" in names} == {"advance_decode"}


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('no such luck')")
    arguments = ["--kernel-backend", "reference", "--only", "peer", "--out", str(tmp_path)]
    program = subprocess.run(
        [sys.executable, "benchmarks/bench_gpu.py", "--device", "cpu", "--tiny", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 1, program.stdout + program.stderr
    assert "FAILED transformers: ImportError: no such luck" in program.stdout
    (path,) = tmp_path.glob("gpu-*.json")
    results = json.loads(path.read_text())
    assert list(results["failures"]) == ["transformers"]
    assert "4 requests of 12 + 5 tokens" in {row["name"] for row in results["rows"]}


def test_when_the_time_is_over_the_rest_is_told(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--tiny", "--kernel-backend", "reference", "--only", "swap", "--only", "dtypes"]
    program = subprocess.run(
        [sys.executable, "benchmarks/bench_gpu.py", *arguments, "--seconds", "9", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 1, program.stdout + program.stderr
    (path,) = tmp_path.glob("gpu-*.json")
    why = "not measured: the 9 s of --seconds were over"
    assert json.loads(path.read_text())["failures"] == {"model": why, "other dtypes": why}


def test_without_a_gpu_it_says_how_to_try_it() -> None:
    program = subprocess.run(
        [sys.executable, "benchmarks/bench_gpu.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 2
    assert "driver: " in program.stdout
    assert "torch finds no CUDA device; --device cpu --tiny tries the benchmark without one" in program.stderr
