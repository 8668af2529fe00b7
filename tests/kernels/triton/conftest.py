"""The Triton kernels in Triton's interpreter, on the CPU.

Whether kernels are interpreted is decided for a whole process, when triton is imported: so the variable is set here,
before any test is collected that imports it. There is no Triton for other systems than Linux on x86-64 to test with.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys

import pytest

if importlib.util.find_spec("triton") is None and (sys.platform, platform.machine()) != ("linux", "x86_64"):
    collect_ignore_glob = ["test_*.py"]

if "triton" in sys.modules:
    interprets = os.environ.get("TRITON_INTERPRET", "0") == "1"
else:
    os.environ["TRITON_INTERPRET"] = "1"
    interprets = True


@pytest.fixture(autouse=True)
def _interpreted():
    if not interprets:
        pytest.fail("triton was imported before TRITON_INTERPRET was set; run these tests in a process of their own")
