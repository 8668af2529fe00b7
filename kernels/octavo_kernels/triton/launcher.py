"""What Triton launches kernels by on a GPU: a small library in C, which it builds once on each machine, and keeps.

It is built by the first launch otherwise, where nobody expects that a compiler may be missing. Kernels themselves need
none: Triton brings the tools that compile them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path


def why_not_launchable() -> str | None:
    """Builds or loads it. Why that cannot be done, with the remedy, or None."""
    import triton

    try:
        # What makes the driver is what launches: it asks for no context of CUDA.
        triton.runtime.driver.active  # noqa: B018
    except AssertionError:  # the only thing that Triton asserts there
        return (
            "Triton finds no libcuda.so.1, which comes with NVIDIA's driver: install it, run ldconfig behind that, or "
            "name its folder in TRITON_LIBCUDA_PATH"
        )
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        return _why_not_built(error)
    return None


def _why_not_built(error: Exception) -> str:
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("gcc", "clang")):
        return (
            "Triton needs a C compiler to build what it launches kernels by: install one (apt-get install gcc "
            "libc6-dev), or name one in CC"
        )
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    if not header.exists():
        return (
            "Triton needs this Python's headers to build what it launches kernels by, and there is no "
            f"{header}: install them (apt-get install python3-dev)"
        )
    return f"Triton cannot build what it launches kernels by: {error}"
