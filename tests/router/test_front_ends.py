"""Both front ends fail alike: by ERROR_TABLE, before the first event where possible, and never as a clean end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import octavo_router
from octavo.errors import ERROR_TABLE, OctavoError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from octavo_router.admin import AdminServicer
from octavo_router.grpc_server import GrpcServer
from octavo_router.http_routes import Routes
from octavo_router.http_server import make_app
from tests.router.fake_engine import FakeEngine, make_backend

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


class FrontEnds:
    """HTTP and gRPC over one fake engine."""

    def __init__(self, engine: FakeEngine, http: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        self.engine = engine
        self.http = http
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)

    def counted(self, name: str, **labels: str) -> float:
        """A counter's value."""
        value = self.engine.metrics.registry.get_sample_value(f"octavo_requests_{name}_total", labels)
        assert value is not None
        return value

    async def grpc_error(self, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
        """What the call ends with, whenever that is."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in self.inference.Generate(request):
                pass
        return caught.value


@pytest.fixture
async def front_ends() -> AsyncIterator[FrontEnds]:
    engine = FakeEngine()
    backend = make_backend(engine)
    server = GrpcServer(host="127.0.0.1", port=0, socket_path="", max_request_bytes=100_000, metrics=engine.metrics)
    await server.start(backend, AdminServicer(backend))
    app = make_app(Routes(backend, metrics=engine.metrics, max_request_bytes=100_000))
    async with (
        httpx.AsyncClient(base_url="http://local", transport=httpx.ASGITransport(app)) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield FrontEnds(engine, http, channel)
    await server.stop(0)


@pytest.mark.parametrize("kind", ERROR_TABLE, ids=lambda kind: kind.__name__)
async def test_refusals_are_by_the_table(front_ends: FrontEnds, kind: type[OctavoError]) -> None:
    row = ERROR_TABLE[kind]
    front_ends.engine.refusal = kind("what happened")
    for path, body in BODIES.items():
        for stream in (False, True):
            response = await front_ends.http.post(path, json={**body, "stream": stream})
            assert response.status_code == row.http_status
            assert response.headers["content-type"] == "application/json"
            error = response.json()["error"]
            assert (error["message"], error["type"], error["code"]) == (
                "what happened",
                row.openai_type,
                row.reason.lower(),
            )
    caught = await front_ends.grpc_error(pb.GenerateRequest(text="x"))
    assert (caught.code(), caught.details()) == (row.grpc_code, "what happened")
    status = rpc_status.from_call(caught)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    assert info.reason == row.reason


@pytest.mark.parametrize("kind", ERROR_TABLE, ids=lambda kind: kind.__name__)
async def test_failures_behind_the_first_token_are_by_the_table(front_ends: FrontEnds, kind: type[OctavoError]) -> None:
    row = ERROR_TABLE[kind]
    front_ends.engine.failure, front_ends.engine.fail_at = kind("what happened"), 2
    for path, body in BODIES.items():
        response = await front_ends.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200
        assert "[DONE]" not in response.text
        last = response.text.removesuffix("\n\n").rpartition("\n\n")[2].rpartition("data: ")[2]
        error = json.loads(last)["error"]
        assert (error["message"], error["type"]) == ("what happened", row.openai_type)
        whole = await front_ends.http.post(path, json=body)
        assert whole.status_code == row.http_status
    assert (await front_ends.grpc_error(pb.GenerateRequest(text="x"))).code() is row.grpc_code


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"temperature": 3}, 400), ({"colour": 1}, 400), ({"model": "other"}, 404), ({"seed": "x"}, 400)],
)
async def test_a_wrong_streaming_request_gets_its_status_before_any_event(
    front_ends: FrontEnds, path: str, wrong: dict[str, Any], status: int
) -> None:
    response = await front_ends.http.post(path, json={**BODIES[path], "stream": True, **wrong})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert not front_ends.engine.requests


def test_no_other_module_chooses_a_status() -> None:
    """gRPC's codes come from the table alone; health's NOT_FOUND is its protocol's."""
    folder = Path(octavo_router.__file__).parent
    choosing = [path.name for path in folder.rglob("*.py") if "StatusCode." in path.read_text(encoding="utf-8")]
    assert choosing == ["health.py"]


async def test_every_request_is_counted_once(front_ends: FrontEnds) -> None:
    """accepted + refused = sent, and accepted = finished where nothing runs any more."""
    http = front_ends.http
    await http.post("/v1/completions", json={"prompt": "x"})
    await http.post("/v1/chat/completions", json={**BODIES["/v1/chat/completions"], "stream": True})
    await http.post("/v1/completions", json={"prompt": ["x", "y"], "stream": True})
    _ = [response async for response in front_ends.inference.Generate(pb.GenerateRequest(text="x"))]
    assert front_ends.counted("accepted") == 5

    await http.post("/v1/completions", content=b"{")
    await http.post("/v1/responses", json={"input": "x", "temperature": 3})
    await front_ends.grpc_error(pb.GenerateRequest())
    await http.post("/v1/completions", json={"prompt": [10**6], "logprobs": 1})
    assert front_ends.counted("refused", reason="invalid") == 4
    await http.post("/v1/completions", content=b"x" * 300_000)
    assert front_ends.counted("refused", reason="too_large") == 1
    await http.post("/v1/completions", json={"prompt": "x", "suffix": "y"})
    await front_ends.grpc_error(pb.GenerateRequest(text="x", adapter="a"))
    assert front_ends.counted("refused", reason="unsupported") == 2
    await front_ends.grpc_error(pb.GenerateRequest(text="x" * 1000))
    assert front_ends.counted("refused", reason="too_long") == 1
    await http.post("/v1/completions", json={"prompt": "x", "model": "other"})
    assert front_ends.counted("refused", reason="model_not_found") == 1
    for kind, reason in (("OverloadedError", "overloaded"), ("UnavailableError", "unavailable")):
        front_ends.engine.refusal = next(row for row in ERROR_TABLE if row.__name__ == kind)("x")
        await http.post("/v1/completions", json={"prompt": "x"})
        assert front_ends.counted("refused", reason=reason) == 1
    front_ends.engine.refusal = None
    # A wrong /tokenize is no request for text.
    await http.post("/tokenize", json={"prompt": 5})
    text = (await http.get("/metrics")).text
    refused = [line for line in text.splitlines() if line.startswith("octavo_requests_refused_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in refused) == 11
    assert front_ends.counted("accepted") == 5
