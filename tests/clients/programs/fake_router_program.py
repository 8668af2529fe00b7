"""Stands in for octavo-router: a FakeRouter at --grpc-socket, which writes --ready-file and ends when it is told to.

With FAKE_ROUTER=stubborn it takes no notice of SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from octavo.config import RouterConfig
from tests.clients.fake_router import FakeRouter

flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
print("router flags:", *sys.argv[1:], flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with FakeRouter(f"unix:{flags['grpc-socket']}"):
    http_port, grpc_port = (
        int(flags.get("port", RouterConfig.port)),
        int(flags.get("grpc-port", RouterConfig.grpc_port)),
    )
    addresses = {
        "http": f"http://127.0.0.1:{http_port or 18000}" if http_port >= 0 else None,
        "grpc": f"127.0.0.1:{grpc_port or 15051}" if grpc_port >= 0 else None,
    }
    Path(flags["ready-file"]).write_text(json.dumps(addresses))
    while os.environ.get("FAKE_ROUTER") == "stubborn":
        signal.pause()
    signal.sigwait({signal.SIGTERM})
print("router says goodbye", flush=True)
