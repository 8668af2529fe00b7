"""What a run needs is looked at first, and named all together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu import preflight

ROOT = Path(__file__).parents[2]


def test_what_is_there_is_told_with_its_version() -> None:
    found = preflight.look(on_gpu=False, needs_triton=False, needs_transformers=False)
    assert found.problems == []
    assert list(found.versions) == ["torch", "numpy", "grpcio", "protobuf"]
    assert f"protobuf {found.versions['protobuf']}" in found.shown()


def test_what_is_missing_or_too_old_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": ("2.13.0+cu130", ""), "numpy": ("1.26.0", ""), "grpcio": (None, "no such module")}
    there |= {"protobuf": ("6.31.0", ""), "triton": ("3.10.0", ""), "transformers": (None, "no such module")}
    monkeypatch.setattr(preflight, "_version", there.get)
    found = preflight.look(on_gpu=False, needs_triton=True, needs_transformers=True)
    assert found.problems == [
        "grpcio 1.74 or later is needed and cannot be imported (no such module): pip install 'grpcio>=1.74'",
        "protobuf is 6.31.0, and 6.31.1 or later is needed: pip install 'protobuf>=6.31.1'",
    ]
    assert [warning.split()[0] for warning in found.warnings] == ["transformers"]


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.sys, "version_info", (3, 10, 12))
    found = preflight.look(on_gpu=False, needs_triton=False, needs_transformers=False)
    assert [problem.partition(",")[0] for problem in found.problems] == ["Python 3.11 or later is needed"]


def test_a_missing_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(preflight.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    warnings = preflight.compiler_warnings(lambda _: None)
    assert [warning.split(",")[0] for warning in warnings] == [
        "there is no C compiler (gcc",
        f"{tmp_path}/Python.h is missing",
    ]
    (tmp_path / "Python.h").touch()
    assert preflight.compiler_warnings(lambda name: "/bin/clang" if name == "clang" else None) == []


def test_kernels_are_kept_elsewhere_where_the_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = preflight.Preflight()
    preflight._ensure_kernel_cache(found)
    assert Path(preflight.os.environ["TRITON_CACHE_DIR"]).is_dir()
    assert len(found.warnings) == 1


def test_a_machine_without_torch_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    program = subprocess.run(
        [sys.executable, "benchmarks/bench_gpu.py", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 2
    assert (
        "torch 2.11 or later is needed and cannot be imported (ImportError: libcuda.so.1 is missing)" in program.stderr
    )
    assert "Traceback" not in program.stderr
    assert not (tmp_path / "out").exists()
