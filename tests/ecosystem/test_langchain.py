"""LangChain's own suite for chat models, run with `langchain-openai` against the served default model.

What the suite asks of a model's wits, rather than of a server, is expected to fail with a model of 135M parameters, and
named below.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.ecosystem.conftest import Served


class TestChatOpenAI(ChatModelIntegrationTests):
    """The suite over our server."""

    @pytest.fixture(autouse=True)
    def _served(self, server: Served) -> None:
        type(self).base_url = f"{server.http}/v1"

    base_url = ""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "SmolLM2-135M-Instruct",
            "base_url": self.base_url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 200,
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}
