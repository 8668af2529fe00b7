"""Which server a command talks to, and how: the one at --address, or its own that lives as long as the command."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.channel import AccessOptions, check_address
from octavo.cli.flags import add_setting_flags, settings_of
from octavo.config import PUBLIC_SETTINGS, private_settings, quiet_log_level, setting_names
from octavo.errors import ConfigError
from octavo.process import ProcessPair

_NOT_SERVED = (
    "host",
    "port",
    "grpc_port",
    "grpc_socket",
    "served_model_name",
    "max_request_bytes",
    "router_name",
    *PUBLIC_SETTINGS,
)


@dataclass(frozen=True)
class ChosenServer:
    """Where the server is and how it is reached: arguments for `Client`."""

    address: str
    access: AccessOptions


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --address, how the server there is reached, and the settings of an own server."""
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="gRPC address of a running server, HOST:PORT or unix:PATH; without it the command starts its own",
    )
    group = parser.add_argument_group(
        "access", "How the server at --address is reached. Its API key is taken from the variable OCTAVO_API_KEY."
    )
    group.add_argument("--tls", action="store_true", help="encrypt, and check the server's certificate")
    group.add_argument("--root-certificates", metavar="FILE", help="authorities to trust (PEM); implies --tls")
    group.add_argument("--client-certificate", metavar="FILE", help="certificate to show (PEM); implies --tls")
    group.add_argument("--client-key", metavar="FILE", help="private key of that certificate (PEM)")
    add_setting_flags(parser, skip=_NOT_SERVED)


@contextlib.contextmanager
def chosen_server(args: argparse.Namespace) -> Iterator[ChosenServer]:
    """The server to talk to. An own server is stopped at the end, also when SIGTERM asks for it.

    Raises ConfigError where an address is given together with settings of an own server, or ways to reach one without
    an address.
    """
    access = AccessOptions(
        tls=args.tls or None,
        root_certificates=args.root_certificates,
        client_certificate=args.client_certificate,
        client_key=args.client_key,
    )
    if args.address is not None:
        own = {name for name in setting_names() if hasattr(args, name)}
        if getattr(args, "model_argument", None) is not None:
            own.add("model")
        if own:
            raise ConfigError(
                f"--address talks to a running server, whose settings cannot be changed from here; leave out: "
                f"{', '.join(sorted(own))}"
            )
        yield ChosenServer(check_address(args.address), access)
        return
    if any(access.values()):
        flags = ", ".join("--" + name.replace("_", "-") for name, value in access.items() if value)
        raise ConfigError(f"{flags} says how to reach a running server; give its --address")
    fixed: dict[str, Any] = private_settings()
    if not hasattr(args, "log_level"):
        fixed["log_level"] = quiet_log_level()
    worker, router = settings_of(args, **fixed)
    with _exit_on_sigterm(), ProcessPair(worker, router, on_log=_show) as pair:
        print(f"starting {worker.model} ...", file=sys.stderr, flush=True)
        yield ChosenServer(pair.wait_ready().grpc, AccessOptions(api_key=""))


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
