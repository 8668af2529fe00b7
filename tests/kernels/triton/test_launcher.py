"""What Triton itself says where it cannot build what it launches by, and what becomes of it: no GPU is needed."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from octavo_kernels import BackendUnavailableError, load_backend
from octavo_kernels.triton import why_unavailable

CUDA = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One on which torch finds a GPU and Triton has built nothing yet. Its folder of headers, which are there."""
    from triton.backends.nvidia import driver

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    monkeypatch.setattr(triton.runtime.driver, "_default", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    for search in (driver.libcuda_dirs, driver.library_dirs):
        search.cache_clear()
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path) if name == "INCLUDEPY" else ".so")
    return tmp_path


def test_a_machine_without_the_driver_s_library(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: b"libc.so.6 (libc6,x86-64) => /lib/libc.so.6")
    assert str(why_unavailable(CUDA)).startswith("Triton finds no libcuda.so.1")


def test_a_machine_without_a_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(machine))
    assert str(why_unavailable(CUDA)).startswith("Triton needs a C compiler")
    with pytest.raises(BackendUnavailableError, match="the triton backend cannot be used: Triton needs a C compiler"):
        load_backend("triton", device=CUDA)
    assert load_backend("auto", device=CUDA).name == "reference"


def test_a_machine_without_python_s_headers(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")  # as a compiler ends that misses a header
    (machine / "Python.h").unlink()
    assert f"there is no {machine / 'Python.h'}: install them" in str(why_unavailable(CUDA))


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails(machine: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert str(why_unavailable(CUDA)).startswith("Triton cannot build what it launches kernels by: ")
    assert compiler in str(why_unavailable(CUDA))


def test_a_machine_that_builds_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", object())
    assert why_unavailable(CUDA) is None
