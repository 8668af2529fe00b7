from __future__ import annotations

import os
import subprocess
import sys


def launch(parent_pid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.launch", str(parent_pid), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def test_runs_a_module_with_its_arguments() -> None:
    done = launch(os.getpid(), "json.tool", "--help")
    assert done.returncode == 0
    assert "usage:" in done.stdout


def test_the_exit_code_is_the_module_s() -> None:
    assert launch(os.getpid(), "json.tool", "--no-such-flag").returncode == 2


def test_ends_at_once_where_the_parent_is_gone_already() -> None:
    assert launch(1, "json.tool", "--help").returncode == -9
