"""Servers that several tests share, and their logs beside a failure.

Starting a pair takes seconds, so a server lives for the whole session, and a test that needs other settings or would
harm a server starts its own with `harness.running`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.completions import Caller
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


@pytest.fixture(scope="session")
def caller(server: Server) -> Caller:
    """The default model, with its prefix cache."""
    return Caller(server)


@pytest.fixture(scope="session")
def uncached() -> Iterator[Caller]:
    """The default model without a prefix cache."""
    server = _register(Server(enable_prefix_caching=False))
    yield Caller(server)
    server.close(at_once=True)


@pytest.fixture(scope="session")
def tiny(tiny_server: Server) -> Caller:
    """A tiny model with room for everything."""
    return Caller(tiny_server)


@pytest.fixture(scope="session")
def tiny_model(tiny_models: dict[str, Path]) -> dict[str, Any]:
    """Settings of a server of the tiny model whose words do not matter."""
    return {"model": str(tiny_models["llama-linear-bias"]), "max_model_len": 512}


@pytest.fixture(scope="session")
def pressed(tiny_model: dict[str, Any]) -> Iterator[Caller]:
    """A tiny model with 1,600 tokens of KV memory and no host tier."""
    server = _register(Server(**tiny_model, num_device_blocks=100, swap_space=0.0))
    yield Caller(server)
    server.close(at_once=True)


@pytest.fixture(scope="session")
def english(references: list[Reference]) -> list[int]:
    """735 token ids of English text."""
    return next(reference.prompt_token_ids for reference in references if reference.name == "english_700")


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
