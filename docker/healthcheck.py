"""Asks the server in this container whether it serves: exit status 0 if it does, 1 and one line why if it does not.

`healthcheck.py router` gets /ready over HTTP, or calls grpc.health.v1 where there is a Unix socket for it;
`healthcheck.py worker` calls grpc.health.v1. Where the server listens, and its certificates, are read from the same
environment variables that the server itself reads. Health needs no key. It runs every few seconds beside the server, so
it imports little.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 4.0  # below the time that the HEALTHCHECK instruction allows, so that the reason is printed


class UnhealthyError(Exception):
    """The server does not serve; the message says why."""


def router_url(environ: Mapping[str, str]) -> str:
    """Where a router in this container says whether it takes requests."""
    scheme = "https" if environ.get("OCTAVO_SSL_KEYFILE") else "http"
    return f"{scheme}://127.0.0.1:{environ.get('OCTAVO_PORT', '8000')}/ready"


def router_context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """TLS towards a router in this container: its name is not checked, since it is asked by another one. A router that
    wants certificates of its clients is shown its own; where that is none of its authorities', set OCTAVO_GRPC_SOCKET.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if environ.get("OCTAVO_SSL_CA_CERTS"):
        context.load_cert_chain(environ["OCTAVO_SSL_CERTFILE"], environ["OCTAVO_SSL_KEYFILE"])
    return context


def worker_target(environ: Mapping[str, str]) -> str:
    """The gRPC target of a worker in this container: its own listening address, seen from inside."""
    listen = environ.get("OCTAVO_LISTEN", "127.0.0.1:50061")
    if listen.startswith("unix:"):
        return listen
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("", "0.0.0.0", "[::]") else listen


def check_router(url: str, context: ssl.SSLContext) -> None:
    """Raises UnhealthyError unless a GET of `url` answers with a status of success."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        opener.open(url, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        body = error.read(200).decode(errors="replace")
        raise UnhealthyError(f"{url} answers {error.code}: {body}") from None
    except OSError as error:
        raise UnhealthyError(f"{url} does not answer: {error}") from None


def worker_certificates(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Files of the connection between router and worker: key, certificate, authorities; None for none."""
    if not environ.get("OCTAVO_WORKER_SSL_KEYFILE"):
        return None
    key, certificate, authorities = (
        environ[f"OCTAVO_WORKER_SSL_{name}"] for name in ("KEYFILE", "CERTFILE", "CA_CERTS")
    )
    return key, certificate, authorities


def name_in_certificate(target: str, certificates: tuple[str, str, str]) -> str:
    """A name that the certificate of the server at `target` is good for: gRPC checks names, and it is asked by another
    one. Raises UnhealthyError where nobody answers or the certificate is not signed by the authorities.
    """
    key, certificate, authorities = certificates
    context = ssl.create_default_context(cafile=authorities)
    context.check_hostname = False
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    host, _, port = target.rpartition(":")
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as connection,
            context.wrap_socket(connection) as secured,
        ):
            names = (secured.getpeercert() or {}).get("subjectAltName", ())
    except OSError as error:
        raise UnhealthyError(f"{target} does not answer: {error}") from None
    for entry in names:
        if entry[0] in ("DNS", "IP Address"):
            return str(entry[1]).replace("*", "any")
    raise UnhealthyError(f"the certificate of {target} names no host")


def check_grpc(target: str, certificates: tuple[str, str, str] | None = None) -> None:
    """Raises UnhealthyError unless grpc.health.v1 at `target` answers SERVING for the server as a whole."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if certificates is None:
        opened = grpc.insecure_channel(target, options=options)
    else:
        key, certificate, authorities = (Path(path).read_bytes() for path in certificates)
        name = "localhost" if target.startswith("unix:") else name_in_certificate(target, certificates)
        options.append(("grpc.ssl_target_name_override", name))
        credentials = grpc.ssl_channel_credentials(authorities, key, certificate)
        opened = grpc.secure_channel(target, credentials, options=options)
    with opened as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs leave out its methods
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise UnhealthyError(f"{target} does not answer: {error.code().name}: {error.details()}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnhealthyError(f"{target} answers {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


def main(arguments: list[str]) -> int:
    """Checks the server that the one argument names, and returns the exit status."""
    try:
        match arguments:
            case ["router"]:
                if path := os.environ.get("OCTAVO_GRPC_SOCKET"):
                    check_grpc(f"unix:{path}")
                else:
                    check_router(router_url(os.environ), router_context(os.environ))
            case ["worker"]:
                check_grpc(worker_target(os.environ), worker_certificates(os.environ))
            case _:
                print("usage: healthcheck.py router|worker", file=sys.stderr)
                return 2
    except UnhealthyError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
