"""Completions over HTTP, for tests that try what users of other servers reported."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.harness import CALL_TIMEOUT_S, Server

BLOCK_SIZE = 16
_PLAIN = {"ignore_eos": True, "skip_special_tokens": False}
Json = dict[str, Any]


class Caller:
    """Sends completions to a server: greedy ones without an end, unless told otherwise."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client = httpx.Client(base_url=server.http_url, timeout=CALL_TIMEOUT_S)

    def post(self, prompt: Any, max_tokens: int = 16, **options: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **_PLAIN, **options}
        return self._client.post("/v1/completions", json=body)

    def complete(self, prompt: Any, max_tokens: int = 16, **options: Any) -> Json:
        """The answer's body. AssertionError unless the status is 200."""
        response = self.post(prompt, max_tokens, **options)
        assert response.status_code == 200, response.text
        body: Json = response.json()
        return body

    def answer(self, prompt: Any, max_tokens: int = 16, **options: Any) -> tuple[str, list[float]]:
        """Text and log-probabilities of the first choice."""
        choice = self.complete(prompt, max_tokens, **{"logprobs": 0, **options})["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    def answers(self, prompts: Sequence[Any], max_tokens: int = 16, **options: Any) -> list[tuple[str, list[float]]]:
        """The answers to all prompts, sent at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.answer(prompt, max_tokens, **options), prompts))


def cached_tokens(body: Json) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def random_prompt(rng: random.Random, num_tokens: int, vocab: range = range(3, 384)) -> list[int]:
    """Token ids that the tiny models know."""
    return rng.choices(vocab, k=num_tokens)
