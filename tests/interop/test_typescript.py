"""The TypeScript client's own tests against a live server, and its example."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.interop.live_server import LiveServer

_INSTALL_TIMEOUT_S = 180
_TEST_TIMEOUT_S = 240
_OLDEST_NODE = 20


@pytest.fixture(scope="module")
def package(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the client with its packages installed and its sources compiled. Skips where that cannot be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node or npm is not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.strip().lstrip("v").split(".")[0]) < _OLDEST_NODE:
        pytest.skip(f"node is {version.strip()}; the client needs {_OLDEST_NODE}")
    folder = tmp_path_factory.mktemp("typescript") / "client"
    source = repository / "clients" / "typescript"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("node_modules", "dist"))
    try:
        install = subprocess.run(
            [npm, "ci", "--ignore-scripts"], cwd=folder, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not install the client's packages in time")
    if install.returncode != 0:
        pytest.skip(f"npm cannot install the client's packages: {install.stderr.strip()[-300:]}")
    build = subprocess.run([npm, "run", "build"], cwd=folder, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout
    return folder


def test_the_clients_own_tests_pass(package: Path, live: LiveServer) -> None:
    done = subprocess.run(
        ["node", "--test", *sorted(map(str, (package / "dist" / "test").glob("*.test.js")))],
        cwd=package,
        env={**os.environ, **live.environment},
        capture_output=True,
        text=True,
        timeout=_TEST_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "# skipped 0" in done.stdout


def test_the_example_prints_an_answer(package: Path, live: LiveServer) -> None:
    environment = {
        **os.environ,
        "OCTAVO_ADDRESS": live.environment["OCTAVO_TEST_ADDRESS"],
        "OCTAVO_API_KEY": live.environment["OCTAVO_TEST_API_KEY"],
    }
    done = subprocess.run(
        ["node", "dist/examples/chat.js", "Hello"],
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens in" in done.stdout
