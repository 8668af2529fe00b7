"""Stands in for octavo-router: a FakeRouter at --grpc-socket, which writes --ready-file and ends when it is told to.

With FAKE_ROUTER=stubborn it takes no notice of SIGTERM; with FAKE_ROUTER=dies:PATH it dies while it answers, where the
file PATH exists, which it removes before; with FAKE_ROUTER=exit it complains and exits with 2; with FAKE_ROUTER=waits
it never serves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc

from octavo.config import RouterConfig
from octavo.v1 import inference_pb2
from tests.clients.fake_router import FakeRouter, cut_off, echo_in_capitals

kind, _, marker = os.environ.get("FAKE_ROUTER", "").partition(":")


def die_once(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    """Takes the request on and dies, where the marker is."""
    try:
        Path(marker).unlink()
    except FileNotFoundError:  # or another request's thread was faster
        yield from echo_in_capitals(request, context)
        return
    yield next(cut_off(1)(request, context))
    os.kill(os.getpid(), signal.SIGKILL)


flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
if kind == "exit":
    print("octavo-router: error: no address", flush=True)
    sys.exit(2)
print("router flags:", *sys.argv[1:], flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if kind == "waits":
    signal.sigwait({signal.SIGTERM})
    sys.exit(0)
with FakeRouter(f"unix:{flags['grpc-socket']}") as router:
    if kind == "dies":
        router.answer = die_once
    http_port, grpc_port = (
        int(flags.get("port", RouterConfig.port)),
        int(flags.get("grpc-port", RouterConfig.grpc_port)),
    )
    addresses = {
        "http": f"http://127.0.0.1:{http_port or 18000}" if http_port >= 0 else None,
        "grpc": f"127.0.0.1:{grpc_port or 15051}" if grpc_port >= 0 else None,
    }
    Path(flags["ready-file"]).write_text(json.dumps(addresses))
    while kind == "stubborn":
        signal.pause()
    signal.sigwait({signal.SIGTERM})
print("router says goodbye", flush=True)
