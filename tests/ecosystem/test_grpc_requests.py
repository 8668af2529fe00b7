"""grpc-requests, which knows of our services only what reflection tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

grpc_requests: Any = pytest.importorskip(
    "grpc_requests", reason="grpc-requests is not installed; see tests/ecosystem/requirements.txt"
)

from tests.ecosystem.conftest import ROOT, Served, serve  # noqa: E402

TINY_MODEL = ROOT / "tests" / "references" / "tiny" / "llama-linear-bias"
INFERENCE = "octavo.v1.InferenceService"


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client by reflection of a server of a tiny model."""
    with serve(f"--model={TINY_MODEL}", "--max-model-len=128", "--dtype=float32") as served:
        yield client_of(served)


def client_of(served: Served) -> Any:
    return grpc_requests.Client.get_by_endpoint(served.grpc)


def test_reflection_names_the_services(client: Any) -> None:
    assert {INFERENCE, "octavo.v1.AdminService", "grpc.health.v1.Health"} <= set(client.service_names)


def test_generate_streams(client: Any) -> None:
    request = {
        "token_ids": {"ids": [5, 6, 7]},
        "sampling": {"temperature": 0},
        "stop": {"max_tokens": 6, "ignore_eos": True},
    }
    responses = list(client.request(INFERENCE, "Generate", request))
    token_ids = [
        token_id
        for response in responses
        for delta in response.get("deltas", [])
        for token_id in delta.get("token_ids", [])
    ]
    assert len(token_ids) == 6
    assert responses[-1]["usage"]["completion_token_count"] == 6
    # The same through its object of a service, in one response.
    service = client.service(INFERENCE)
    (whole,) = service.Generate({**request, "output": {"final_only": True}})
    assert whole["deltas"][0]["token_ids"] == token_ids
    assert whole["deltas"][0]["finish_reason"] == "FINISH_REASON_LENGTH"


def test_unary_calls(client: Any) -> None:
    tokens = client.request(INFERENCE, "Tokenize", {"text": "Hello"})
    assert client.request(INFERENCE, "Detokenize", {"token_ids": tokens["token_ids"], "skip_special_tokens": True})[
        "text"
    ]
    (model,) = client.request(INFERENCE, "ListModels", {})["models"]
    assert model["name"] == TINY_MODEL.name
    assert client.request("grpc.health.v1.Health", "Check", {})["status"] == "SERVING"
    assert client.request("octavo.v1.AdminService", "GetState", {})["workers"]


def test_a_mistake_names_the_field(client: Any) -> None:
    with pytest.raises(Exception, match=r"temperature is 3; it must be from 0 to 2"):
        list(client.request(INFERENCE, "Generate", {"text": "x", "sampling": {"temperature": 3}}))
