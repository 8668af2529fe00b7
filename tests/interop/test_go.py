"""The Go client's own tests against a live server, and its example.

Go finds what the client needs as ordinary modules, or in Debian's packages golang-google-grpc-dev,
golang-google-protobuf-dev and golang-github-golang-protobuf-1-5-dev, which lie in a GOPATH and need no network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.interop.live_server import LiveServer

_DEBIAN_SOURCES = Path("/usr/share/gocode")
_NEEDED = (
    "google.golang.org/grpc",
    "google.golang.org/protobuf",
    "google.golang.org/genproto/googleapis/rpc/errdetails",
)
_BUILD_TIMEOUT_S = 240
_TEST_TIMEOUT_S = 240


@dataclass(frozen=True)
class Workspace:
    """A copy of the client where its packages are found. `environment` is for the go command."""

    folder: Path
    environment: dict[str, str]

    def go(self, *arguments: str, timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["go", *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


@pytest.fixture(scope="module")
def workspace(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The client, built. Skips where Go or the client's packages are missing."""
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    root = tmp_path_factory.mktemp("go")
    folder = root / "src" / "octavo"  # where a GOPATH has the package of this import path
    shutil.copytree(repository / "clients" / "go", folder)
    if all((_DEBIAN_SOURCES / "src" / package).is_dir() for package in _NEEDED):
        debian = {"GO111MODULE": "off", "GOFLAGS": "", "GOPATH": f"{root}:{_DEBIAN_SOURCES}"}
        workspace = Workspace(folder, debian)
    else:
        workspace = Workspace(folder, {"GO111MODULE": "on", "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"})
        try:
            download = workspace.go("mod", "download", timeout_s=120)
        except subprocess.TimeoutExpired:
            pytest.skip("the client's modules could not be downloaded in time")
        if download.returncode != 0:
            pytest.skip(f"the client's modules cannot be downloaded: {download.stderr.strip()[-300:]}")
    vet = workspace.go("vet", "./...", timeout_s=_BUILD_TIMEOUT_S)
    assert vet.returncode == 0, vet.stderr
    return workspace


def test_the_clients_own_tests_pass(workspace: Workspace, live: LiveServer) -> None:
    done = workspace.go("test", "-count=1", "-v", ".", timeout_s=_TEST_TIMEOUT_S, **live.environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "--- SKIP" not in done.stdout


def test_the_example_prints_an_answer(workspace: Workspace, live: LiveServer) -> None:
    done = workspace.go(
        "run",
        "./examples/chat",
        "Hello",
        timeout_s=120,
        OCTAVO_ADDRESS=live.environment["OCTAVO_TEST_ADDRESS"],
        OCTAVO_API_KEY=live.environment["OCTAVO_TEST_API_KEY"],
    )
    assert done.returncode == 0, done.stderr
    assert "tokens in" in done.stdout


def test_the_code_is_formatted(workspace: Workspace) -> None:
    if shutil.which("gofmt") is None:
        pytest.skip("gofmt is not installed")
    done = subprocess.run(["gofmt", "-l", "."], cwd=workspace.folder, capture_output=True, text=True, check=True)
    assert done.stdout == ""
