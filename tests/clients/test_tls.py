from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import RouterConfig, WorkerConfig
from octavo.errors import ConfigError
from octavo.tls import link_identity, load_authorities, server_context, server_identity
from tests.certificates import Certificates, make_certificates


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "junk").write_text("-----BEGIN JUNK-----\n")
    (folder / "empty").write_text("")
    return make_certificates(folder)


def router(files: Certificates, **changes: Any) -> RouterConfig:
    settings = {"ssl_keyfile": files.server_key, "ssl_certfile": files.server_chain, **changes}
    return RouterConfig.from_values(settings, {})


def test_without_files_there_is_no_tls() -> None:
    assert server_identity(RouterConfig()) is None
    assert server_context(RouterConfig()) is None
    assert link_identity(WorkerConfig()) is None


def test_files_that_fit(files: Certificates) -> None:
    identity = server_identity(router(files))
    assert identity is not None
    assert identity.authorities is None
    mutual = server_identity(router(files, ssl_ca_certs=files.authority, ssl_cert_reqs=2))
    assert mutual is not None
    assert mutual.authorities == files.authority.read_bytes()


def test_authorities_with_their_names_between_them(files: Certificates) -> None:
    bundle = files.authority.parent / "bundle"
    bundle.write_bytes("# Müller & Söhne\n".encode() + files.authority.read_bytes())
    assert load_authorities("root_certificates", bundle) == bundle.read_bytes()
    context = server_context(router(files, ssl_ca_certs=bundle, ssl_cert_reqs=2))
    assert context is not None
    assert context.cert_store_stats()["x509_ca"] == 1


def test_a_key_is_in_no_repr(files: Certificates) -> None:
    identity = server_identity(router(files))
    assert "PRIVATE" not in repr(identity)


def test_a_key_of_another_certificate(files: Certificates) -> None:
    with pytest.raises(ConfigError, match=r"ssl_keyfile \S+ is not the key of the certificate in ssl_certfile \S+"):
        server_identity(router(files, ssl_keyfile=files.client_key))


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_certfile"])
def test_a_file_that_is_something_else(files: Certificates, name: str) -> None:
    with pytest.raises(ConfigError, match="are not a private key and its certificate in PEM format"):
        server_identity(router(files, **{name: files.authority.parent / "junk"}))


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_certfile", "ssl_ca_certs"])
def test_a_file_that_is_not_there(files: Certificates, name: str) -> None:
    changes = {"ssl_ca_certs": files.authority, "ssl_cert_reqs": 2, name: "/no/such.pem"}
    with pytest.raises(ConfigError, match=f"{name} /no/such.pem cannot be read: No such file or directory"):
        server_identity(router(files, **changes))


@pytest.mark.parametrize("content", ["junk", "empty"])
def test_authorities_that_are_none(files: Certificates, content: str) -> None:
    with pytest.raises(ConfigError, match=r"root_certificates .* holds no certificates in PEM format"):
        load_authorities("root_certificates", files.authority.parent / content)


def test_a_key_with_a_passphrase(files: Certificates, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(files.server_key.read_bytes(), None)
    path = tmp_path / "key.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigError, match="is encrypted; give a key without a passphrase"):
        server_identity(router(files, ssl_keyfile=path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_keyfile": "k"}, "ssl_keyfile is given without ssl_certfile"),
        ({"ssl_certfile": "c"}, "ssl_certfile is given without ssl_keyfile"),
        ({"ssl_ca_certs": "a", "ssl_cert_reqs": 2}, "ssl_ca_certs is given without ssl_keyfile"),
        (
            {"ssl_keyfile": "k", "ssl_certfile": "c", "ssl_ca_certs": "a"},
            "asks clients for no certificate; set it to 2",
        ),
        ({"ssl_keyfile": "k", "ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs is 2 without ssl_ca_certs"),
        ({"ssl_cert_reqs": 1}, "ssl_cert_reqs is 1; it must be one of 0, 2"),
        ({"worker_ssl_keyfile": "k"}, "worker_ssl_certfile, worker_ssl_ca_certs is missing"),
    ],
)
def test_files_without_the_others(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig.from_values(settings, {})
    assert message in caught.value.message
