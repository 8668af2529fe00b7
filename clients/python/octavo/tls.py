"""Certificates and keys: read from files, checked for what can be known at start, and made into gRPC's credentials.

Raises ConfigError that names the setting, the file and what is wrong with it. What is encrypted and who is asked for a
certificate is decided by the callers.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from octavo.config import RouterConfig, WorkerConfig
from octavo.errors import ConfigError

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, repr=False)
class TlsIdentity:
    """A private key, its certificate chain and, where the other side must prove itself too, the authorities to trust.

    All as the PEM files hold them.
    """

    key: bytes
    chain: bytes
    authorities: bytes | None = None

    @classmethod
    def load(cls, key: tuple[str, StrPath], chain: tuple[str, StrPath], authorities: tuple[str, StrPath]) -> Self:
        """Reads the files; each is given with its setting's name, and an empty path of authorities is none.

        Raises ConfigError for a file that cannot be read, holds something else, or does not fit the others.
        """
        keys, chains = _read(*key), _read(*chain)
        _check_pair(key, chain)
        return cls(keys, chains, load_authorities(*authorities) if authorities[1] else None)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server; clients need a certificate if there are authorities."""
        return grpc.ssl_server_credentials(
            [(self.key, self.chain)],
            root_certificates=self.authorities,
            require_client_auth=self.authorities is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client that shows this identity and trusts these authorities; without any, the system's."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.chain)


def server_identity(config: RouterConfig) -> TlsIdentity | None:
    """What the router serves its clients with; None for no TLS. Raises ConfigError."""
    if not config.ssl_keyfile:
        return None
    return TlsIdentity.load(
        ("ssl_keyfile", config.ssl_keyfile),
        ("ssl_certfile", config.ssl_certfile),
        ("ssl_ca_certs", config.ssl_ca_certs),
    )


def server_context(config: RouterConfig) -> ssl.SSLContext | None:
    """As `server_identity`, for HTTP. Clients need a certificate if there are authorities. Raises ConfigError."""
    identity = server_identity(config)
    if identity is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    if identity.authorities is not None:
        context.load_verify_locations(cadata=_without_remarks(identity.authorities))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def link_identity(config: WorkerConfig | RouterConfig) -> TlsIdentity | None:
    """A program's end of the connection between router and worker, which is mutual or not TLS (None at all). Raises
    ConfigError.
    """
    if not config.worker_ssl_keyfile:
        return None
    return TlsIdentity.load(
        ("worker_ssl_keyfile", config.worker_ssl_keyfile),
        ("worker_ssl_certfile", config.worker_ssl_certfile),
        ("worker_ssl_ca_certs", config.worker_ssl_ca_certs),
    )


def load_authorities(name: str, path: StrPath) -> bytes:
    """The PEM file of trusted certificates. Raises ConfigError where it cannot be read or holds none."""
    data = _read(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_without_remarks(data))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{name} {os.fspath(path)} holds no certificates in PEM format") from None
    return data


def _without_remarks(pem: bytes) -> str:
    """Certificates alone are ASCII; the owners' names that often stand between them need not be."""
    return pem.decode("ascii", "ignore")


def _read(name: str, path: StrPath) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {os.fspath(path)} cannot be read: {error.strerror}") from None


def _check_pair(key: tuple[str, StrPath], chain: tuple[str, StrPath]) -> None:
    """Raises ConfigError unless the key is the certificate's."""
    key_text, chain_text = (f"{name} {os.fspath(path)}" for name, path in (key, chain))
    asked = False

    def no_password() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain[1], key[1], password=no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if asked:
            raise ConfigError(f"{key_text} is encrypted; give a key without a passphrase") from None
        if reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key_text} is not the key of the certificate in {chain_text}") from None
        raise ConfigError(
            f"{key_text} and {chain_text} are not a private key and its certificate in PEM format"
        ) from None
