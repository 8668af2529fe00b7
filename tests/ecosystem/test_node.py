"""Clients on Node: OpenAI's SDK and the AI SDK. Their tests are in node/, in their own language."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ecosystem.conftest import Served

FOLDER = Path(__file__).with_name("node")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder with its packages installed."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here; install Node.js 20 or newer")
    folder = tmp_path_factory.mktemp("node") / "clients"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--omit=optional"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    if installed.returncode != 0:
        pytest.skip(f"the packages cannot be installed: {installed.stderr[-500:]}")
    return folder


def test_clients_on_node(packages: Path, server: Served) -> None:
    tests = subprocess.run(
        ["npm", "test", "--silent"],
        cwd=packages,
        env=os.environ | {"OCTAVO_URL": server.http},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert tests.returncode == 0, tests.stdout[-8000:] + tests.stderr[-2000:]
