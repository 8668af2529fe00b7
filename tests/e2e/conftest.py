"""Servers that several tests share, and their logs beside a failure.

Starting a pair takes seconds, so a server lives for the whole session, and a test that needs other settings or would
harm a server starts its own with `harness.running`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.e2e.harness import Reference, Server, load_references

_LOG_LINES = 60
_servers: list[Server] = []


def _register(server: Server) -> Server:
    _servers.append(server)
    return server


@pytest.fixture(scope="session")
def references() -> list[Reference]:
    """The default model's 32 references."""
    return load_references()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default model in fp32 with default scheduling."""
    server = _register(Server())
    yield server
    server.close(at_once=True)


@pytest.fixture(scope="session")
def tiny_server(tiny_models: dict[str, Any]) -> Iterator[Server]:
    """A random model that answers at once, for tests to which the words do not matter."""
    server = _register(Server(model=str(tiny_models["llama-linear-bias"]), max_model_len=512))
    yield server
    server.close(at_once=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the ends of the servers' logs to the report of a failed test."""
    report = yield
    if report.failed:
        for server in _servers:
            title = f"log of {server.settings.get('model', 'the default model')}"
            report.sections.append((title, "\n".join(server.log[-_LOG_LINES:])))
    return report
