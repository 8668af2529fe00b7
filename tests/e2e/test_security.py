"""A pair with everything on: keys, TLS with certificates of the clients, and a worker that knows its router.

Its own log, and what other users of the machine can read of its processes, must not tell a key.
"""

from __future__ import annotations

import os
import re
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo import Client, SamplingParams
from octavo.async_client import AsyncClient
from octavo.channel import AccessOptions
from octavo.config import pair_settings
from octavo.errors import AuthenticationError, UnavailableError
from octavo.process import Endpoints, ProcessPair
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.certificates import Certificates, make_certificates
from tests.e2e.harness import running, wait_until

KEY, OTHER_KEY = "key-of-the-first-team-4711", "key-of-the-second-team-4712"
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


class SecuredPair:
    """The pair, with a log of both programs."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.certificates = make_certificates(folder)
        self.strangers = make_certificates(folder / "strangers")
        files = self.certificates
        self.key_file = folder / "keys"
        self.key_file.write_text(f"# teams\n{OTHER_KEY}  # the second\n")
        self.log: list[str] = []
        worker, router = pair_settings(
            {
                **settings,
                "dtype": "float32",
                "num_threads": 2,
                "num_device_blocks": 100,
                "port": 0,
                "grpc_port": 0,
                "api_key": KEY,
                "api_key_file": str(self.key_file),
                "ssl_keyfile": str(files.server_key),
                "ssl_certfile": str(files.server_chain),
                "ssl_ca_certs": str(files.authority),
                "ssl_cert_reqs": 2,
                "worker_ssl_keyfile": str(files.server_key),
                "worker_ssl_certfile": str(files.server_chain),
                "worker_ssl_ca_certs": str(files.authority),
                "allowed_origins": ("https://chat.test",),
                "trust_request_chat_template": True,
            },
            environ={},
        )
        self.pair = ProcessPair(worker, router, on_log=lambda name, line: self.log.append(f"{name}: {line}"))
        try:
            self.endpoints: Endpoints = self.pair.wait_ready(40)
        except BaseException:
            self.pair.stop(at_once=True)
            raise AssertionError("\n".join(self.log)) from None

    def access(self, **changes: Any) -> AccessOptions:
        """How a client reaches the pair; `changes` win, and None leaves a part out."""
        files = self.certificates
        options = {
            "api_key": KEY,
            "root_certificates": files.authority,
            "client_certificate": files.client_chain,
            "client_key": files.client_key,
            **changes,
        }
        return cast(AccessOptions, options)

    def http(self, files: Certificates | None = None) -> httpx.Client:
        """A client with the authority's certificate, which shows one of the given files'."""
        context = ssl.create_default_context(cafile=str(self.certificates.authority))
        if files is not None:
            context.load_cert_chain(files.client_chain, files.client_key)
        return httpx.Client(verify=context, base_url=self.endpoints.http, trust_env=False)

    def worker_socket(self) -> str:
        return self.endpoints.local.replace("router.sock", "worker.sock")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, tiny_model: dict[str, Any]) -> Iterator[SecuredPair]:
    pair = SecuredPair(tmp_path_factory.mktemp("secured"), tiny_model)
    yield pair
    pair.pair.stop(at_once=True)


def test_addresses_say_that_they_are_encrypted(secured: SecuredPair) -> None:
    assert secured.endpoints.http.startswith("https://127.0.0.1:")


def test_our_client_with_everything(secured: SecuredPair) -> None:
    with Client(secured.endpoints.grpc, **secured.access()) as client:
        assert client.health(timeout=30)
        output = client.generate("Hello", GREEDY)
        assert len(output.outputs[0].token_ids) == 4
        assert len(list(client.stream("Hello", GREEDY))) >= 1
        assert client.state().workers[0].name == "worker-0"


async def test_our_asynchronous_client_with_everything(secured: SecuredPair) -> None:
    async with AsyncClient(secured.endpoints.grpc, **secured.access(api_key=OTHER_KEY)) as client:
        assert len((await client.generate("Hello", GREEDY)).outputs[0].token_ids) == 4


def test_openai_client_with_everything(secured: SecuredPair) -> None:
    with secured.http(secured.certificates) as connection:
        http: Any = connection  # the SDK takes it, whichever httpx its types name
        client = openai.OpenAI(base_url=f"{secured.endpoints.http}/v1", api_key=KEY, http_client=http)
        answer = client.completions.create(model=client.models.list().data[0].id, prompt="Hello", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        wrong = openai.OpenAI(base_url=f"{secured.endpoints.http}/v1", api_key="wrong", http_client=http, max_retries=0)
        with pytest.raises(openai.AuthenticationError) as caught:
            wrong.completions.create(model="m", prompt="Hello")
    assert caught.value.status_code == 401
    assert caught.value.response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], KEY + "x", KEY.upper()])
def test_calls_without_a_good_key(secured: SecuredPair, key: str) -> None:
    with Client(secured.endpoints.grpc, **secured.access(api_key=key)) as client:
        assert client.health(timeout=30)
        for call in (
            lambda: client.generate("Hello", GREEDY),
            client.list_models,
            client.state,
            client.drain,
            client.flush_prefix_cache,
        ):
            with pytest.raises(AuthenticationError, match="no API key was sent, or one that is not known"):
                call()


def test_the_unix_socket_wants_a_key_too(secured: SecuredPair) -> None:
    with Client(secured.endpoints.local, api_key="") as client, pytest.raises(AuthenticationError):
        client.list_models()
    with Client(secured.endpoints.local, api_key=KEY) as client:
        assert client.list_models()


def test_reflection_wants_a_key(secured: SecuredPair) -> None:
    with grpc.insecure_channel(secured.endpoints.local) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter([request]), timeout=30))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {KEY}"),)
        assert list(stub.ServerReflectionInfo(iter([request]), timeout=30, metadata=metadata))


def test_clients_without_a_good_certificate(secured: SecuredPair) -> None:
    strangers = secured.strangers
    for access in (
        secured.access(client_certificate=None, client_key=None),
        secured.access(client_certificate=strangers.client_chain, client_key=strangers.client_key),
        secured.access(root_certificates=strangers.authority),
        AccessOptions(api_key=KEY),
    ):
        client = Client(secured.endpoints.grpc, resume_timeout_s=0, **access)
        with client, pytest.raises(UnavailableError):
            client.list_models(timeout=10)
    for shown in (None, secured.strangers):
        with secured.http(shown) as http, pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            http.get("/health")


def test_a_worker_refuses_strangers(secured: SecuredPair) -> None:
    files = secured.certificates
    address = secured.worker_socket()
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        worker_pb2_grpc.WorkerServiceStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # it speaks TLS only
    credentials = grpc.ssl_channel_credentials(
        files.authority.read_bytes(), files.client_key.read_bytes(), files.client_chain.read_bytes()
    )
    name = [("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(address, credentials, options=name) as channel:
        health_stub: Any = health_pb2_grpc.HealthStub(channel)
        health = health_stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        calls: list[tuple[Any, Any]] = [
            (worker_pb2_grpc.WorkerServiceStub(channel).Describe, worker_pb2.DescribeRequest()),
            (worker_pb2_grpc.WorkerServiceStub(channel).Run, iter([worker_pb2.RunRequest()])),
            (inference_pb2_grpc.InferenceServiceStub(channel).ListModels, inference_pb2.ListModelsRequest()),
        ]
        for call, request in calls:
            for metadata in ((), (("authorization", f"Bearer {KEY}"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(request, timeout=10, metadata=metadata))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_no_key_is_in_a_log_or_in_a_list_of_processes(secured: SecuredPair) -> None:
    with Client(secured.endpoints.grpc, **secured.access()) as client:
        client.generate("Hello", GREEDY)
    text = "\n".join(secured.log)
    for pid in secured.pair.pids().values():
        text += Path(f"/proc/{pid}/cmdline").read_text()
    (token,) = {_variable(pid, "OCTAVO_WORKER_TOKEN") for pid in secured.pair.pids().values()}
    assert len(token) >= 40
    assert "ready" in text
    assert "--ssl-keyfile" in text
    for secret in (KEY, OTHER_KEY, token):
        assert secret not in text


def _variable(pid: int, name: str) -> str:
    """A variable in the environment of a process, which its user alone can read."""
    variables = dict(entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if entry)
    return variables[name]


def test_keys_change_with_their_file(secured: SecuredPair) -> None:
    secured.key_file.write_text("a-new-key\n")
    try:
        with secured.http(secured.certificates) as http:
            _until_status(http, "a-new-key", 200)
            assert http.get("/v1/models", headers={"authorization": f"Bearer {OTHER_KEY}"}).status_code == 401
            assert http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    finally:
        secured.key_file.write_text(OTHER_KEY + "\n")


def _until_status(http: httpx.Client, key: str, status: int) -> None:
    def became() -> bool:
        return http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status

    wait_until(became, 30, lambda: f"the status never became {status}")


def test_a_template_of_a_request(secured: SecuredPair) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with secured.http(secured.certificates) as http:
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"messages": [{"role": "user", "content": "Hello"}], "chat_template": template}
        answer = http.post("/tokenize", json=body, headers=headers)
        plain = http.post("/tokenize", json={"prompt": "Hello", "add_special_tokens": False}, headers=headers)
        assert answer.json()["tokens"] == plain.json()["tokens"]
        body["chat_template"] = "{{ ''.__class__.__mro__ }}"
        refused = http.post("/v1/chat/completions", json=body, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "chat_template"


def test_web_pages_of_allowed_origins(secured: SecuredPair) -> None:
    with secured.http(secured.certificates) as http:
        preflight = {"origin": "https://chat.test", "access-control-request-method": "POST"}
        answer = http.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.test"
        refused = http.get("/v1/models", headers={"origin": "https://chat.test"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.test"
        assert "access-control-allow-origin" not in http.get("/health", headers={"origin": "https://evil.test"}).headers


BAD_BODIES: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "x" * 50_000}),
    ("/v1/completions", {"prompt": [10**9]}),
    ("/v1/completions", {"prompt": "x", "model": "other"}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}),
    ("/v1/completions", {"prompt": "x", "guided_regex": "("}),
    ("/v1/completions", b"{"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{% include 'x' %}"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ x.y.z }}"}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 'x'.center(10**10) }}"},
    ),
    ("/v1/chat/completions", {"messages": [], "response_format": {"type": "json_schema"}}),
    ("/tokenize", {"prompt": 5}),
    ("/detokenize", {"tokens": [-1]}),
]
# Absolute paths, and what the interpreter would say of ours.
PATH = re.compile(
    r"(?<![\w.:/])/(tmp|work|root|home|usr|opt|var|run|etc|proc)\b|\.py\b|\.sock\b|Traceback|site-packages"
)


@pytest.mark.parametrize(("path", "body"), BAD_BODIES)
def test_no_error_tells_a_path(secured: SecuredPair, path: str, body: Any) -> None:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    with secured.http(secured.certificates) as http:
        response = http.post(path, headers={"authorization": f"Bearer {KEY}"}, **content)
    assert response.status_code in (400, 404), response.text
    assert not PATH.search(response.text), response.text


def test_a_lost_worker_is_not_located(tiny_model: dict[str, Any]) -> None:
    with running(**tiny_model, worker_timeout_s=0.2, step_timeout_s=1.0) as server:
        os.kill(server.pair.pids()["worker"], signal.SIGSTOP)
        try:
            with pytest.raises(grpc.RpcError) as caught:
                server.generate("Hello")
            answer = httpx.post(f"{server.http_url}/v1/completions", json={"prompt": "Hello"}, timeout=30)
        finally:
            os.kill(server.pair.pids()["worker"], signal.SIGCONT)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert answer.status_code == 503
    for text in (str(caught.value.details()), answer.text):
        assert "no worker has answered" in text
        assert not PATH.search(text), text
