"""What the client's tests share: a fake router, and programs that stand in for the worker and the router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.program import ProgramSpec
from tests.clients.fake_router import FakeRouter

PROGRAMS = (
    ProgramSpec("worker", "fake_worker_program", "octavo-worker"),
    ProgramSpec("router", "fake_router_program", "octavo-router"),
)


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    """A fake router that listens on a port of this machine."""
    with FakeRouter() as router:
        yield router


def make_findable(patch: pytest.MonkeyPatch) -> None:
    """Lets this process and its children find the stand-ins."""
    here = Path(__file__).parent
    folders = [here / "programs", here.parent.parent, here.parent.parent / "clients" / "python"]
    patch.setenv("PYTHONPATH", ":".join(map(str, folders)))
    patch.syspath_prepend(str(folders[0]))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> tuple[ProgramSpec, ProgramSpec]:
    """The stand-ins for both programs, found by this process and by its children."""
    make_findable(monkeypatch)
    return PROGRAMS
