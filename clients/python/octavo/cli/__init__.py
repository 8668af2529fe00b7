"""The `octavo` command: serve, chat, generate, kv-size.

This module parses and turns errors into exit codes; each command has a module of its own. Exit codes: 0 all went well,
1 a request or the server failed, 2 wrong usage, settings or model, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from octavo import __version__
from octavo.cli import chat, generate, kv_size, serve
from octavo.errors import ConfigError, ModelLoadError, OctavoError, StartError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name and returns its exit code. Users' mistakes give one line, no
    traceback.
    """
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return _exit_code(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away. Python flushes stdout once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo",
        description="Serve a large language model and talk to it.",
        epilog="`octavo COMMAND --help` tells a command's flags.",
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, chat, generate, kv_size):
        command.add_command(commands)
    return parser


def _exit_code(error: OctavoError) -> int:
    wrong_usage = isinstance(error, ConfigError | ModelLoadError)
    wrong_start = isinstance(error, StartError) and error.exit_code == EXIT_USAGE
    return EXIT_USAGE if wrong_usage or wrong_start else EXIT_FAILED
