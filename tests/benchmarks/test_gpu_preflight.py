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


def test_a_missing_compiler_is_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(preflight.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert preflight.compiler_problems(lambda _: None) == [
        "there is no C compiler, which Triton launches its kernels with: install gcc or clang, or name one by $CC",
        f"{tmp_path}/Python.h is missing, which Triton compiles with: install Python's development headers",
    ]
    (tmp_path / "Python.h").touch()
    assert preflight.compiler_problems(lambda name: "/bin/clang" if name == "clang" else None) == []


@pytest.mark.parametrize("needs_triton", [True, False])
def test_a_compiler_is_needed_by_kernels_that_are_compiled_on_a_gpu(
    needs_triton: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(preflight, "_version", lambda _: ("99", ""))
    monkeypatch.setattr(preflight, "_has_cuda", lambda: True)
    monkeypatch.setattr(preflight, "_driver", lambda: "NVIDIA H200, 570.1, Default")
    monkeypatch.setattr(preflight, "compiler_problems", lambda: ["no compiler"])
    found = preflight.look(on_gpu=True, needs_triton=needs_triton, needs_transformers=False)
    assert (found.problems, found.warnings) == (["no compiler"] if needs_triton else [], [])


@pytest.mark.parametrize(
    ("gpus", "mode"),
    [
        ("NVIDIA H200, 570.1, Default", None),
        ("no answer (nvidia-smi is not there)", None),
        ("NVIDIA H200, 570.1, Exclusive_Process", "Exclusive_Process"),
        ("NVIDIA H200, 570.1, Prohibited; NVIDIA H200, 570.1, Exclusive_Process", "Prohibited"),
        ("NVIDIA H200, 570.1, Exclusive_Process; NVIDIA H200, 570.1, Default", None),
    ],
)
def test_a_gpu_for_one_process_is_a_problem(gpus: str, mode: str | None) -> None:
    problems = preflight.compute_mode_problems(gpus)
    assert [problem.split(",")[0] for problem in problems] == ([f"the GPU's compute mode is {mode}"] if mode else [])
    assert all("--compute-mode=DEFAULT" in problem for problem in problems)


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
