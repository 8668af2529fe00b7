"""What a run needs of the machine, looked at before anything is measured: packages, the device, a compiler.

What is missing is told at once and all together; what may only turn out to be a problem is a warning.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OLDEST = {
    "torch": "2.11",
    "numpy": "1.26",
    "grpcio": "1.74",
    "protobuf": "6.31.1",
    "triton": "3.6",
    "transformers": "4.56",
}
"""The packages, and the oldest versions that will do."""
_OLDEST_PYTHON = (3, 11)
_MODULES = {"grpcio": "grpc", "protobuf": "google.protobuf"}
_QUERY = "name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm,compute_mode"


@dataclass
class Preflight:
    """versions: of packages, None where there is none; gpu: what the driver says; problems: with which no run is worth
    its time; warnings: about what may go wrong."""

    versions: dict[str, str | None] = field(default_factory=dict)
    gpu: str = ""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For the results."""
        return {"versions": self.versions, "gpu": self.gpu, "warnings": self.warnings}

    def shown(self) -> str:
        """For people."""
        versions = ", ".join(f"{name} {version or 'missing'}" for name, version in self.versions.items())
        lines = [versions, *([f"driver: {self.gpu}"] if self.gpu else [])]
        return "\n".join([*lines, *(f"WARNING: {warning}" for warning in self.warnings)])


def look(*, on_gpu: bool, needs_triton: bool, needs_transformers: bool) -> Preflight:
    """Looks at packages and, for a run on a GPU, at the device and what Triton compiles with."""
    found = Preflight()
    if sys.version_info < _OLDEST_PYTHON:
        found.problems.append(
            f"Python {'.'.join(map(str, _OLDEST_PYTHON))} or later is needed, and this is {sys.version}"
        )
    _check_packages(found, {"triton": needs_triton, "transformers": needs_transformers})
    if on_gpu:
        found.gpu = _driver()
        if found.versions["torch"] and not _has_cuda():
            found.problems.append(
                "torch finds no CUDA device; --device cpu --tiny tries the benchmark without one "
                f"(torch {found.versions['torch']}; nvidia-smi: {found.gpu})"
            )
        found.problems += compute_mode_problems(found.gpu)
        found.problems += compiler_problems() if needs_triton else []
        _ensure_kernel_cache(found)
    return found


def _check_packages(found: Preflight, needed: dict[str, bool]) -> None:
    for name, oldest in _OLDEST.items():
        if not needed.get(name, True):
            continue
        version, why = _version(name)
        found.versions[name] = version
        if version is None:
            text = f"{name} {oldest} or later is needed and cannot be imported ({why}): pip install '{name}>={oldest}'"
        elif _numbers(version) < _numbers(oldest):
            text = f"{name} is {version}, and {oldest} or later is needed: pip install '{name}>={oldest}'"
        else:
            continue
        # Without transformers there is nobody to compare with, and all the rest can be measured.
        (found.warnings if name == "transformers" else found.problems).append(text)


def _version(name: str) -> tuple[str | None, str]:
    """(version of a package, or None and why it cannot be imported)."""
    try:
        module = importlib.import_module(_MODULES.get(name, name))
    except Exception as error:  # whatever a broken package raises
        return None, f"{type(error).__name__}: {error}"
    return str(getattr(module, "__version__", "0")), ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _driver() -> str:
    """The GPUs and their driver, as nvidia-smi tells them; why it does not where it does not."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        program = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no answer ({error})"
    return "; ".join(program.stdout.split("\n")).strip("; ")


def compute_mode_problems(gpus: str) -> list[str]:
    """Where no GPU lets several processes compute at the same time, as a run has them do. gpus: see `_driver`."""
    modes = [gpu.rpartition(",")[2].strip() for gpu in gpus.split(";")]
    if not all(mode.startswith("Exclusive") or mode == "Prohibited" for mode in modes):
        return []
    return [
        f"the GPU's compute mode is {modes[0]}, and several processes of a run are on it at the same time: "
        "let them with nvidia-smi --compute-mode=DEFAULT, as root"
    ]


def compiler_problems(which: Callable[[str], str | None] = shutil.which) -> list[str]:
    """What Triton would miss, which compiles a few lines of C for every kernel it launches."""
    problems = []
    if not (os.environ.get("CC") or which("gcc") or which("clang")):
        problems.append(
            "there is no C compiler, which Triton launches its kernels with: install gcc or clang, or name one by $CC"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        problems.append(f"{header} is missing, which Triton compiles with: install Python's development headers")
    return problems


def _ensure_kernel_cache(found: Preflight) -> None:
    """The processes of a run share compiled kernels by Triton's cache; it must be somewhere that can be written."""
    try:
        home = Path(os.environ.get("TRITON_HOME") or Path.home())
        cache = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except (OSError, RuntimeError) as error:  # the second where this user has no home
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="octavo-triton-")
        found.warnings.append(
            f"kernels are kept in {os.environ['TRITON_CACHE_DIR']}, for the usual place cannot be used: {error}"
        )
