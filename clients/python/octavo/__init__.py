"""Octavo's Python client: talk to a server, or start one of your own.

    Client, AsyncClient    call a running server
    LLM, AsyncLLMEngine    start a router and a worker and call them, from scripts and from asyncio programs
    EngineArgs             what those two are started with
    SamplingParams, RequestOutput, CompletionOutput    what goes in and comes out, with vLLM's names

Names are imported when they are first used: the router and the worker import this package for the contract and the
errors alone, and a program's start should not pay for what it does not use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo import errors
    from octavo.async_client import AsyncClient
    from octavo.async_engine import AsyncLLMEngine
    from octavo.client import Client
    from octavo.engine_args import AsyncEngineArgs, EngineArgs
    from octavo.llm import LLM
    from octavo.types import (
        CompletionOutput,
        GuidedDecodingParams,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "Client",
    "CompletionOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "errors",
]

_HOMES = {
    "AsyncClient": "octavo.async_client",
    "AsyncEngineArgs": "octavo.engine_args",
    "AsyncLLMEngine": "octavo.async_engine",
    "Client": "octavo.client",
    "CompletionOutput": "octavo.types",
    "EngineArgs": "octavo.engine_args",
    "GuidedDecodingParams": "octavo.types",
    "LLM": "octavo.llm",
    "RequestOutput": "octavo.types",
    "RequestOutputKind": "octavo.types",
    "SamplingParams": "octavo.types",
    "StructuredOutputsParams": "octavo.types",
    "TextPrompt": "octavo.types",
    "TokensPrompt": "octavo.types",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("octavo.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
