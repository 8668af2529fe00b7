"""What children of the router find in their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_router.child_process import child_command, child_environment


def test_the_environment_holds_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("TZ", "UTC")
    environment = child_environment()
    assert "hush" not in environment.values()
    assert environment["TZ"] == "UTC"
    assert environment["PATH"] == os.environ["PATH"]


def test_modules_that_lie_about_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "octavo_router.py").write_text("raise SystemExit('mine')")
    command = child_command("octavo_router.grammar_process")
    assert command[0] == sys.executable
    ended = subprocess.run(
        command, cwd=tmp_path, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
