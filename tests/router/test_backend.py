"""What the front ends find behind them, before and after the first worker."""

from __future__ import annotations

import pytest

from octavo.errors import UnavailableError
from octavo_router.backend import Backend
from tests.router.fake_engine import FakeEngine, make_backend


@pytest.mark.parametrize("name", ["engine", "inference", "tokenizer"])
def test_before_a_worker_everything_is_unavailable_for_a_while(name: str) -> None:
    backend = Backend()
    assert not backend.is_ready
    with pytest.raises(UnavailableError, match="waits for its first worker") as caught:
        getattr(backend, name)
    assert caught.value.retry_after_s == 2


async def test_an_open_backend_is_as_ready_as_its_engine() -> None:
    engine = FakeEngine()
    backend = make_backend(engine)
    assert backend.engine is engine
    assert backend.is_ready
    engine.is_connected = False
    assert not backend.is_ready
    engine.is_connected = True
    engine.begin_drain()
    assert not backend.is_ready
