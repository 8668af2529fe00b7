"""What all tests share: where things are."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = ROOT / "tests" / "references"


def pytest_configure() -> None:
    """Tests interrupt themselves and programs, which a shell's background jobs would ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, Path]:
    """The tiny checkpoints by name: each a folder that a worker can load, with its references.json."""
    return {path.name: path for path in sorted((REFERENCES / "tiny").iterdir())}
