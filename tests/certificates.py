"""Certificates for tests: an authority, a server and a client, as PEM files in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """Paths of the files. authority: to be trusted by both sides."""

    authority: Path
    server_key: Path
    server_chain: Path
    client_key: Path
    client_chain: Path


def make_certificates(folder: Path, *, server_names: Sequence[str] = ("localhost", "127.0.0.1")) -> Certificates:
    """A new authority and what it signed."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    made = Certificates(*(folder / f"{name}.pem" for name in ("authority", "key", "chain", "client_key", "client")))
    authority.cert_pem.write_to_path(made.authority)
    for identities, key, chain in (
        (server_names, made.server_key, made.server_chain),
        (("client.test",), made.client_key, made.client_chain),
    ):
        issued = authority.issue_cert(*identities)
        issued.private_key_pem.write_to_path(key)
        chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return made
