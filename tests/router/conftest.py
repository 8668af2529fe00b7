"""What the router's tests share: golden transcripts. `pytest tests/router --rewrite` writes those in testdata/ anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TESTDATA = Path(__file__).parent / "testdata"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write golden transcripts instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a transcript with testdata/NAME.txt, or writes it there with --rewrite."""

    def check(name: str, transcript: str) -> None:
        path = TESTDATA / f"{name}.txt"
        if request.config.getoption("rewrite", default=False):
            path.write_text(transcript)
        assert transcript == path.read_text(), f"{path} differs; if that is meant, run with --rewrite and read the diff"

    return check
