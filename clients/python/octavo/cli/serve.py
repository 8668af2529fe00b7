"""`octavo serve`: a worker and a router on this machine, kept alive until they are asked to stop."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from octavo.authentication import read_keys
from octavo.cli.flags import add_model_argument, add_setting_flags, settings_of
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.process import Endpoints, ProcessPair

_QUESTION = "What is the capital of France?"
_MODELS_TIMEOUT_S = 10.0
_SIGNALS_S = 0.5


@dataclass(frozen=True)
class _Ended:
    """The pair has ended: with None as it was asked to, else by itself."""

    error: OctavoError | None


# The pair serves, a signal has arrived, or the pair has ended.
_Event = Endpoints | signal.Signals | _Ended


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP and gRPC",
        description="Starts a worker and a router, joined by a Unix socket, and keeps both alive. Ctrl-C or SIGTERM "
        "stops: new requests are refused, running ones finish within --grace-period-s; a second one stops at once. "
        "Every flag may also be given as an environment variable: --max-num-seqs is OCTAVO_MAX_NUM_SEQS. "
        "Flags under `worker` that concern both programs go to both.",
    )
    add_model_argument(parser)
    add_setting_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal asks it to stop or the pair gives up. Raises what made it give up."""
    worker, router = settings_of(args)
    keys = [*router.api_key, *(read_keys(Path(router.api_key_file)) if router.api_key_file else ())]
    events: SimpleQueue[_Event] = SimpleQueue()
    with _signals_to(events):
        started_at = time.monotonic()
        with ProcessPair(
            worker, router, on_log=_show, on_ready=events.put, on_end=lambda error: events.put(_Ended(error))
        ) as pair:
            is_stopping = False
            while True:
                event = _next(events)
                if isinstance(event, Endpoints):
                    _announce(event, time.monotonic() - started_at, keys)
                elif isinstance(event, signal.Signals):
                    if not is_stopping:
                        _show(
                            "octavo", f"{event.name}: stopping; running requests may finish. Once more to stop at once"
                        )
                    pair.begin_stop(at_once=is_stopping)
                    is_stopping = True
                elif event.error is not None:
                    raise event.error
                else:
                    return 0


def _next(events: SimpleQueue[_Event]) -> _Event:
    """Waits for an event, and looks up now and then: a signal may wake another thread instead, as it does where it
    comes right behind SIGSTOP and SIGCONT, and what Python does about it is done only when this thread goes on.
    """
    while True:
        with contextlib.suppress(Empty):
            return events.get(timeout=_SIGNALS_S)


@contextlib.contextmanager
def _signals_to(events: SimpleQueue[_Event]) -> Iterator[None]:
    """Turns SIGINT and SIGTERM into events; the queue's put is safe in a signal handler."""

    def note(number: int, frame: object) -> None:
        events.put(signal.Signals(number))

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _announce(endpoints: Endpoints, seconds: float, keys: Sequence[str]) -> None:
    """Prints where the server is and one line to try. Asks it with one of the keys, and shows none."""
    with Client(endpoints.local, api_key=keys[0] if keys else "") as client:
        models = [model.name for model in client.list_models(timeout=_MODELS_TIMEOUT_S)]
    lines = [f"Serving {', '.join(models)} after {seconds:.1f} s."]
    if endpoints.http:
        lines.append(f"  HTTP  {endpoints.http}/v1")
    lines.append(f"  gRPC  {endpoints.grpc}")
    lines.append("Try:")
    lines.append(f"  {_line_to_try(endpoints, models[0], needs_key=bool(keys))}")
    print("\n".join(lines), flush=True)


def _line_to_try(endpoints: Endpoints, model: str, *, needs_key: bool) -> str:
    if not endpoints.http:
        return f"octavo chat --address {endpoints.grpc} --temperature 0 --message '{_QUESTION}'"
    body = {"model": model, "messages": [{"role": "user", "content": _QUESTION}], "temperature": 0}
    key = '-H "Authorization: Bearer $KEY" ' if needs_key else ""
    url = f"{endpoints.http}/v1/chat/completions"
    return f"curl {url} {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _show(name: str, line: str) -> None:
    print(f"{name:<6} | {line}", file=sys.stderr, flush=True)
