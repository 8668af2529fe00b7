"""Asks the server in this container whether it serves: exit status 0 if it does, 1 and one line why if it does not.

`healthcheck.py router` gets /health over HTTP; `healthcheck.py worker` calls grpc.health.v1. Where the server listens
is read from the same environment variables that the server itself reads. It runs every few seconds beside the server,
so it imports little.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 4.0  # below the time that the HEALTHCHECK instruction allows, so that the reason is printed


class UnhealthyError(Exception):
    """The server does not serve; the message says why."""


def router_url(environ: Mapping[str, str]) -> str:
    """Where a router in this container answers for its health."""
    return f"http://127.0.0.1:{environ.get('OCTAVO_PORT', '8000')}/health"


def worker_target(environ: Mapping[str, str]) -> str:
    """The gRPC target of a worker in this container: its own listening address, seen from inside."""
    listen = environ.get("OCTAVO_LISTEN", "127.0.0.1:50061")
    if listen.startswith("unix:"):
        return listen
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("", "0.0.0.0", "[::]") else listen


def check_router(url: str) -> None:
    """Raises UnhealthyError unless a GET of `url` answers with a status of success."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        body = error.read(200).decode(errors="replace")
        raise UnhealthyError(f"{url} answers {error.code}: {body}") from None
    except OSError as error:
        raise UnhealthyError(f"{url} does not answer: {error}") from None


def check_worker(target: str) -> None:
    """Raises UnhealthyError unless grpc.health.v1 at `target` answers SERVING for the server as a whole."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
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
                check_router(router_url(os.environ))
            case ["worker"]:
                check_worker(worker_target(os.environ))
            case _:
                print("usage: healthcheck.py router|worker", file=sys.stderr)
                return 2
    except UnhealthyError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
