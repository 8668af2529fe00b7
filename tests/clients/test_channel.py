from __future__ import annotations

import pytest

from octavo.channel import channel_options, check_address, is_serving
from octavo.errors import ConfigError
from tests.clients.fake_router import FakeRouter


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
