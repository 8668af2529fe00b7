"""What the router's tests share: golden transcripts. `pytest tests/router --rewrite` writes those in testdata/ anew."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTDATA = Path(__file__).parent / "testdata"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write golden transcripts instead of comparing with them")


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Random searches leave a million objects behind: collecting them takes a second, which is not to fall into a test
    of another file that waits for the clock."""
    yield
    gc.collect()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a transcript with testdata/NAME.txt, or writes it there with --rewrite."""

    def check(name: str, transcript: str) -> None:
        path = TESTDATA / f"{name}.txt"
        if request.config.getoption("rewrite", default=False):
            path.write_text(transcript)
        assert transcript == path.read_text(), f"{path} differs; if that is meant, run with --rewrite and read the diff"

    return check
