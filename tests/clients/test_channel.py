from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo import Client
from octavo.channel import Access, AccessOptions, channel_options, check_address, is_serving
from octavo.errors import ConfigError
from tests.certificates import make_certificates
from tests.clients.fake_router import FakeRouter, echo_in_capitals


@pytest.mark.parametrize("address", ["127.0.0.1:50051", "router:1", "[::1]:65535", "unix:/run/o.sock", "unix:o.sock"])
def test_addresses_are_taken_as_they_are(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["", "router", "router:", ":1", "router:0", "router:65536", "http://r:1", "unix:"])
def test_what_is_no_address_is_named_with_an_example(address: str) -> None:
    with pytest.raises(ConfigError, match="such as 127") as error:
        check_address(address)
    assert repr(address) in error.value.message


@pytest.mark.parametrize(
    ("address", "direct"),
    [("unix:/s", True), ("localhost:1", True), ("127.0.0.2:1", True), ("[::1]:1", True), ("router:1", False)],
)
def test_a_proxy_is_not_used_for_this_machine(address: str, direct: bool) -> None:
    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) is direct


def test_serving_is_what_the_health_service_says(router: FakeRouter) -> None:
    assert is_serving(router.address, timeout_s=5)
    router.health.enter_graceful_shutdown()
    assert not is_serving(router.address, timeout_s=5)
    assert not is_serving("127.0.0.1:9", timeout_s=5)


@pytest.mark.parametrize(
    ("options", "environ", "sent"),
    [
        ({}, {}, ()),
        ({"api_key": "mine"}, {}, (("authorization", "Bearer mine"),)),
        ({}, {"OCTAVO_API_KEY": "first,second"}, (("authorization", "Bearer first"),)),
        ({}, {"OCTAVO_API_KEY": ",second"}, (("authorization", "Bearer second"),)),
        ({"api_key": "mine"}, {"OCTAVO_API_KEY": "first"}, (("authorization", "Bearer mine"),)),
        ({"api_key": ""}, {"OCTAVO_API_KEY": "first"}, ()),
    ],
)
def test_the_key_is_the_one_given_or_the_environments(
    options: AccessOptions, environ: dict[str, str], sent: tuple[tuple[str, str], ...]
) -> None:
    access = Access.of(options, environ)
    assert access.metadata == sent
    assert "mine" not in repr(access)


def test_a_key_in_the_environment_that_can_be_none() -> None:
    with pytest.raises(ConfigError, match="OCTAVO_API_KEY must be printable ASCII") as caught:
        Access.of({}, {"OCTAVO_API_KEY": "hush\n"})
    assert "hush" not in caught.value.message


def test_every_call_carries_the_key(router: FakeRouter) -> None:
    seen: list[Any] = []

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        seen.append(dict(context.invocation_metadata()).get("authorization"))
        return echo_in_capitals(request, context)

    router.answer = answer
    with Client(router.address, api_key="mine") as client:
        client.generate("x")
    assert seen == ["Bearer mine"]


def test_files_imply_tls(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    assert Access.of({}, {}).credentials is None
    for options in (
        AccessOptions(tls=True),
        AccessOptions(root_certificates=files.authority),
        AccessOptions(client_certificate=files.client_chain, client_key=files.client_key),
    ):
        assert Access.of(options, {}).credentials is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key": "two words"}, "api_key must be printable ASCII"),
        ({"client_key": "k"}, "client_key is given without client_certificate"),
        ({"client_certificate": "c"}, "client_certificate is given without client_key"),
        ({"tls": False, "root_certificates": "r"}, "tls is False, but certificates are given"),
        ({"root_certificates": "/no/such"}, "root_certificates /no/such cannot be read"),
        ({"client_certificate": "/no/c", "client_key": "/no/k"}, "client_key /no/k cannot be read"),
    ],
)
def test_access_that_cannot_be(options: AccessOptions, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Access.of(options, {})
    assert message in caught.value.message
    assert "two words" not in caught.value.message
