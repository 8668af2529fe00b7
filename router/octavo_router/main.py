"""The program `octavo-router`: flags, logging, signals and exit codes around `program.py`.

SIGTERM or SIGINT drains: health turns NOT_SERVING, new requests are refused, running ones finish within the grace
period. A second signal ends at once. Exit codes: 0 after a signal, 1 for a failure, 2 for settings or a model at fault.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from octavo import event_loop
from octavo.config import RouterConfig
from octavo.errors import ConfigError, ModelLoadError
from octavo.garbage import spare_long_lived
from octavo_router import __version__
from octavo_router.program import Program

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a router until a signal ends it. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="octavo-router", description="Serves a worker's model over gRPC and over OpenAI's API.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"octavo-router {__version__}")
    RouterConfig.add_flags(parser)
    try:
        config = RouterConfig.from_values(vars(parser.parse_args(arguments)))
        _set_up_logging(config)
        event_loop.run(run(config))
    except (ConfigError, ModelLoadError) as error:
        print(f"octavo-router: {error.message}", file=sys.stderr)
        return 2
    return 0


async def run(config: RouterConfig) -> None:
    """Serves until a signal ends it. Raises ConfigError and ModelLoadError as `Program` does."""
    signals = _StopSignals()
    program = Program(config)
    try:
        if await _unless(signals.first, program.start()):
            spare_long_lived()
            await signals.first.wait()
            logger.info("stopping; running requests get %g s, another signal ends them", config.grace_period_s)
            await _unless(signals.second, program.drain())
    finally:
        await program.stop()


class _StopSignals:
    """SIGTERM and SIGINT: the first asks to stop, the second to stop at once. Needs a running event loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does work unless event comes first, which cancels it. Returns whether the work was done; raises its error."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for pending in (task, waiter):
            pending.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


def _set_up_logging(config: RouterConfig) -> None:
    logging.basicConfig(
        level=config.log_level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)-7s {config.router_name} %(name)s: %(message)s",
        force=True,
    )
    # What these say at info is about themselves, and what uvicorn warns of is what strangers sent, a line each time.
    for name, level in (("uvicorn", logging.ERROR), ("asyncio", logging.WARNING), ("grpc", logging.WARNING)):
        logging.getLogger(name).setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
