"""Schemathesis on our own OpenAPI document: requests that it makes up, right and wrong ones, against a live server.

No answer is a server's error, every one has a status, a type and a content that the document describes, and what breaks
a schema is refused.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

schemathesis: Any = pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed; see tests/ecosystem/requirements.txt"
)
hypothesis: Any = pytest.importorskip("hypothesis")

from tests.ecosystem.conftest import ROOT, Served, serve  # noqa: E402

TINY_MODEL = ROOT / "tests" / "references" / "tiny" / "llama-linear-bias"
# A context is generated to its end where a request does not say how long it wants to be.
FLAGS = (f"--model={TINY_MODEL}", "--max-model-len=64", "--dtype=float32", "--num-device-blocks=2000")
CHECKS = [
    getattr(schemathesis.checks, name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    )
]
CALL_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    """A random model that answers at once."""
    with serve(*FLAGS) as served:
        yield served


def request_all(url: str, num_examples: int) -> int:
    """Sends made-up requests to every operation of the document, so many right ones to each that takes anything
    and as many wrong ones to each that takes a body, and checks the answers. Returns how many that were.
    """
    num_requests = 0
    settings = hypothesis.settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        # A path that is a string cannot be a wrong one.
        modes = list(schemathesis.GenerationMode) if operation.body else [schemathesis.GenerationMode.POSITIVE]
        for mode in modes:

            @settings
            @hypothesis.given(operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                nonlocal num_requests
                num_requests += 1
                response = case.call(timeout=CALL_TIMEOUT_S)
                case.validate_response(response, checks=CHECKS)

            check()
    return num_requests


MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [[5, 6], [7]], "n": 2, "logprobs": 2, "max_tokens": 4}),
    ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "x", "use_beam_search": True, "beam_width": 3, "n": 2, "max_tokens": 4}),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [*range(3, 90)], "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": FORMAT}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 4, "top_logprobs": 2}),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
]


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [(path, body, stream) for path, body in ASKED for stream in (False, True) if path.startswith("/v1/") or not stream],
)
def test_answers_that_are_asked_for_are_as_described(
    tiny: Served, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Few of the requests that are made up get as far as this."""
    schema = schemathesis.openapi.from_url(f"{tiny.http}/openapi.json")
    asked = body | ({"stream": True, "stream_options": {}} if stream else {})
    case = schema[path]["POST"].Case(body=asked, media_type="application/json")
    response = case.call(timeout=CALL_TIMEOUT_S)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"][0].startswith("text/event-stream" if stream else "application/json")
    # The document is what is looked at: whether a request is a right one, these know themselves.
    case.validate_response(response, checks=CHECKS[:-1])


def check_well(url: str) -> None:
    """The server takes requests, and has none left."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert opener.open(f"{url}/ready", timeout=10).status == 200
    metrics = opener.open(f"{url}/metrics", timeout=10).read().decode()
    assert "\noctavo_requests_unfinished 0.0\n" in metrics
    # What was counted as accepted has ended.
    sums = {
        name: sum(float(value) for value in re.findall(rf"^octavo_requests_{name}_total\S* (\S+)$", metrics, re.M))
        for name in ("accepted", "finished")
    }
    assert sums["accepted"] == sums["finished"] > 0


def test_answers_are_as_described(tiny: Served) -> None:
    assert request_all(tiny.http, 25) >= 250
    check_well(tiny.http)


@pytest.mark.full
def test_answers_to_two_thousand_requests_are_as_described(tiny: Served) -> None:
    assert request_all(tiny.http, 200) >= 2000
    check_well(tiny.http)
