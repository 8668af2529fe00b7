"""The OpenAPI document and its page: nothing is missing, nothing comes from elsewhere, answers are as described."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from octavo_router import openapi
from octavo_router.http_routes import Routes
from octavo_router.http_server import make_app
from octavo_router.openai_body import Body
from octavo_router.openai_responses_schema import ResponsesBody
from octavo_router.openai_schema import ChatCompletionBody, CompletionBody
from octavo_router.openapi_ranges import RANGES
from tests.router.fake_engine import FakeEngine, make_backend

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    engine = FakeEngine()
    app = make_app(Routes(make_backend(engine), metrics=engine.metrics, max_request_bytes=100_000))
    async with httpx.AsyncClient(base_url="http://local", transport=httpx.ASGITransport(app)) as client:
        yield client


def references(value: Any) -> set[str]:
    """Every $ref within a document."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(references(item) for item in value))
    return set()


async def test_the_document_describes_every_route(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/{model}", "/tokenize",
        "/detokenize", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/docs",
    }  # fmt: skip
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert "200" in operation["responses"]
            # Probes and scrapers carry no keys.
            is_open = path in ("/health", "/ready", "/metrics", "/version")
            assert is_open == ("401" not in operation["responses"]) == (operation.get("security") == [])
            assert all(response["content"] for response in operation["responses"].values())
    for path in GENERATING:
        responses = document["paths"][path]["post"]["responses"]
        assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}
        assert responses.keys() == {"200", "400", "401", "404", "413", "429", "500", "503"}
        assert "Retry-After" in responses["429"]["headers"]
    assert "temperature" in schemas["ChatCompletionBody"]["properties"]
    assert schemas["ResponsesBody"]["required"] == ["input"]


def test_operations_have_names_of_their_own() -> None:
    names = [operation.name for operation in openapi.OPERATIONS]
    assert len(set(names)) == len(names)


async def test_the_page_needs_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    page = await http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|https?://|src=|@import|url\(", page.text)
    targets = set(re.findall(r'href="#([^"]+)"', page.text))
    assert targets <= set(re.findall(r'id="([^"]+)"', page.text))
    for path in GENERATING:
        assert path in page.text


@pytest.mark.parametrize("operation", openapi.OPERATIONS, ids=lambda operation: operation.name)
async def test_methods(http: httpx.AsyncClient, operation: openapi.Operation) -> None:
    path = operation.template.replace("{model}", "tiny")
    if operation.method == "GET":
        head, whole = await http.head(path), await http.get(path)
        assert (head.status_code, whole.status_code) == (200, 200)
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert not head.content
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - {operation.method}:
        response = await http.request(method, path)
        assert response.status_code == 405
        assert operation.method in response.headers["allow"]
        assert response.json()["error"]["type"] == "invalid_request_error"


BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/v1/chat/completions": (ChatCompletionBody, {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/responses": (ResponsesBody, {"input": "x"}),
}


def beyond(words: dict[str, Any]) -> list[Any]:
    """Values just outside each bound."""
    values = {
        "minimum": lambda bound: bound - 1,
        "exclusiveMinimum": lambda bound: bound,
        "maximum": lambda bound: bound + 1,
        "maxLength": lambda bound: "x" * (bound + 1),
        "minLength": lambda bound: "",
        "minItems": lambda bound: [],
        "maxItems": lambda bound: ["x"] * (bound + 1),
    }
    return [values[word](bound) for word, bound in words.items()]


@pytest.mark.parametrize("name", RANGES)
async def test_what_is_outside_a_range_is_refused(http: httpx.AsyncClient, name: str) -> None:
    taken = [path for path, (body, _) in BODIES.items() if name in body.model_fields]
    assert taken
    for path in taken:
        if name == "logprobs" and path == "/v1/chat/completions":
            continue  # a boolean there
        extra = {"use_beam_search": True} if name in ("beam_width", "length_penalty") else {}
        for value in beyond(RANGES[name]):
            response = await http.post(path, json=BODIES[path][1] | extra | {name: value})
            assert response.status_code == 400, (path, value, response.text)


def test_ranges_are_in_the_document() -> None:
    schemas = openapi.document()["components"]["schemas"]
    choices = schemas["ResponsesBody"]["properties"]["temperature"]["anyOf"]
    assert choices == [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}]
    assert schemas["CompletionBody"]["properties"]["prompt"]["anyOf"][0] == {"type": "string", "minLength": 1}
