"""API keys and CORS of the HTTP front end, around the real routes and a fake engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from octavo.authentication import KeyRing
from octavo.config import RouterConfig
from octavo_router import openapi
from octavo_router.http_routes import Routes
from octavo_router.http_security import OPEN_PATHS, secure
from octavo_router.http_server import make_app
from tests.router.fake_engine import FakeEngine, make_backend

KEY = "a-good-key"


@contextlib.asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application with these settings."""
    config = RouterConfig.from_values(settings, {})
    engine = FakeEngine()
    routes = Routes(make_backend(engine), metrics=engine.metrics, max_request_bytes=100_000)
    app = make_app(routes, protect=lambda app: secure(app, config, KeyRing(config.api_key), engine.metrics))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://local") as http:
        yield http


def authorized(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [{}, authorized("wrong"), {"authorization": KEY}, {"x-api-key": KEY}])
async def test_a_request_without_a_good_key(headers: dict[str, str]) -> None:
    async with client(api_key=KEY) as http:
        response = await http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "unauthenticated", None)
    assert ("no API key was sent" in error["message"]) == ("authorization" not in headers)
    assert KEY not in response.text


async def test_refusals_are_counted() -> None:
    async with client(api_key=KEY) as http:
        for key in ("wrong", KEY, "none"):
            await http.get("/v1/models", headers=authorized(key))
        metrics = (await http.get("/metrics")).text
    assert "octavo_unauthenticated_calls_total 2.0" in metrics


async def test_a_request_with_a_good_key() -> None:
    async with client(api_key=("other", KEY)) as http:
        response = await http.post("/v1/completions", json={"prompt": "Hi"}, headers=authorized())
    assert response.status_code == 200


async def test_without_keys_everybody_is_served() -> None:
    async with client() as http:
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/v1/models", headers=authorized("any"))).status_code == 200


async def test_every_operation_wants_a_key_but_the_open_ones() -> None:
    async with client(api_key=KEY) as http:
        for operation in openapi.OPERATIONS:
            status = (
                await http.request(operation.method, operation.path.replace("{", "").replace("}", ""))
            ).status_code
            assert (status != 401) == (operation.path in OPEN_PATHS), operation.path


@pytest.mark.parametrize(
    "path",
    ["/", "/none", "//v1/models", "/health/", "/HEALTH", "/health/v1", "/v1/models/%2e%2e/health"],
)
async def test_paths_that_only_look_open(path: str) -> None:
    async with client(api_key=KEY) as http:
        assert (await http.request("GET", httpx.URL("http://local", raw_path=path.encode()))).status_code == 401


async def test_no_cors_headers_unless_asked_for() -> None:
    async with client() as http:
        answer = await http.get("/v1/models", headers={"origin": "https://a.test"})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        preflight = {"origin": "https://a.test", "access-control-request-method": "POST"}
        assert (await http.options("/v1/completions", headers=preflight)).status_code == 405


async def test_cors_for_the_origins_that_were_named() -> None:
    async with client(allowed_origins="https://a.test", api_key=KEY) as http:
        preflight = {
            "origin": "https://a.test",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        allowed = await http.options("/v1/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.test"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        refused = await http.options("/v1/completions", headers={**preflight, "origin": "https://b.test"})
        assert "access-control-allow-origin" not in refused.headers
        answer = await http.get("/v1/models", headers={"origin": "https://a.test", **authorized()})
        assert answer.headers["access-control-allow-origin"] == "https://a.test"
        unknown = await http.get("/v1/models", headers={"origin": "https://a.test"})
        assert (unknown.status_code, unknown.headers["access-control-allow-origin"]) == (401, "https://a.test")


async def test_cors_with_credentials_and_fewer_methods() -> None:
    settings = {"allowed_origins": "https://a.test", "allowed_methods": "GET", "allow_credentials": True}
    async with client(**settings) as http:
        headers = {"origin": "https://a.test", "access-control-request-method": "POST"}
        assert (await http.options("/v1/completions", headers=headers)).status_code == 400
        answer = await http.get("/v1/models", headers={"origin": "https://a.test"})
        assert answer.headers["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"messages":['])
async def test_deeply_nested_bodies(opening: bytes) -> None:
    async with client() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/responses"):
            response = await http.post(path, content=opening * (90_000 // len(opening)))
            assert response.status_code == 400, (path, response.text)
            closed = b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}"
            response = await http.post(path, content=closed)
            assert response.status_code == 400, (path, response.text)


@pytest.mark.parametrize("field", ["chat_template_kwargs", "response_format", "metadata", "tools", "logit_bias"])
async def test_deeply_nested_fields(field: str) -> None:
    for depth in (150, 1000, 12_000):
        nested = '{"a":' * depth + "1" + "}" * depth
        body = '{"messages":[{"role":"user","content":"x"}],"' + field + '":' + nested + "}"
        async with client() as http:
            response = await http.post("/v1/chat/completions", content=body.encode())
            assert response.status_code in (200, 400), response.text


async def test_many_unknown_keys() -> None:
    body = "{" + ",".join(f'"key{number}":{number}' for number in range(5000)) + "}"
    async with client() as http:
        response = await http.post("/v1/completions", content=body.encode())
    assert response.status_code == 400
    assert len(response.text) < 1000
