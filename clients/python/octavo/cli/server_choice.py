"""Which server a command talks to: the one at --address, or one of its own that lives as long as the command."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from octavo.channel import check_address
from octavo.cli.flags import add_setting_flags, settings_of
from octavo.config import quiet_log_level, setting_names
from octavo.errors import ConfigError
from octavo.process import ProcessPair

_NOT_SERVED = ("host", "port", "grpc_port", "grpc_socket", "served_model_name", "max_request_bytes", "router_name")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --address and the settings of an own server."""
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="gRPC address of a running server, HOST:PORT or unix:PATH; without it the command starts its own",
    )
    add_setting_flags(parser, skip=_NOT_SERVED)


@contextlib.contextmanager
def chosen_server(args: argparse.Namespace) -> Iterator[str]:
    """The address of the server to talk to. An own server is stopped at the end, also when SIGTERM asks for it.

    Raises ConfigError where an address is given together with settings of an own server.
    """
    if args.address is not None:
        own = {name for name in setting_names() if hasattr(args, name)}
        if getattr(args, "model_argument", None) is not None:
            own.add("model")
        if own:
            raise ConfigError(
                f"--address talks to a running server, whose settings cannot be changed from here; leave out: "
                f"{', '.join(sorted(own))}"
            )
        yield check_address(args.address)
        return
    fixed: dict[str, Any] = {"port": -1, "grpc_port": -1}
    if not hasattr(args, "log_level"):
        fixed["log_level"] = quiet_log_level()
    worker, router = settings_of(args, **fixed)
    with _exit_on_sigterm(), ProcessPair(worker, router, on_log=_show) as pair:
        print(f"starting {worker.model} ...", file=sys.stderr, flush=True)
        yield pair.wait_ready().grpc


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM unwind the stack, so that `with` blocks end what they began."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _show(name: str, line: str) -> None:
    print(f"{name} | {line}", file=sys.stderr, flush=True)
