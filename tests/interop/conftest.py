"""What the tests of other people's and other languages' clients share: live servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def live(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with an API key whose router may be killed, and one with TLS beside it."""
    with live_server(tiny_models["llama-linear-bias"], tmp_path_factory.mktemp("certificates")) as live:
        yield live
