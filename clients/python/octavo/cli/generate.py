"""`octavo generate`: many prompts in, JSON lines out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from octavo.async_client import AsyncClient
from octavo.batch import BatchProgress, Job, Result, run_batch
from octavo.cli.flags import add_samples_flags, add_sampling_flags, samples_of, sampling_of
from octavo.cli.grammar_flags import add_grammar_flags, structured_of
from octavo.cli.prompt_input import OrderedWriter, is_json_lines, json_job, plain_job
from octavo.cli.server_choice import ChosenServer, add_server_flags, chosen_server
from octavo.errors import ConfigError, OctavoError
from octavo.types import SamplingParams

_DEFAULT_MAX_TOKENS = 256
_DEFAULT_CONCURRENCY = 256
_HEALTH_TIMEOUT_S = 10.0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "generate",
        help="generate for many prompts, JSON lines out",
        description="Takes prompts from the arguments, from --input or from stdin: plain lines, or JSON lines with "
        '"prompt", "messages" or "prompt_token_ids" and, where wanted, sampling parameters of their own. Writes one '
        "JSON line for each, in their order: index, text, token_count, finish_reason, or error. "
        "Exits with 1 if one failed. Starts a server of its own unless --address names one.",
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="a prompt; without one, --input or stdin is read")
    parser.add_argument("--input", metavar="FILE", help="file with one prompt a line; - is stdin")
    parser.add_argument("--output", metavar="FILE", help="file to write instead of stdout")
    parser.add_argument(
        "--input-format",
        choices=("auto", "text", "jsonl"),
        default="auto",
        help="what the lines are; auto looks at the first one (default: auto)",
    )
    parser.add_argument("--chat", action="store_true", help="plain lines are a user's messages, not raw prompts")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=_DEFAULT_CONCURRENCY,
        metavar="INT",
        help=f"most requests under way at a time (default: {_DEFAULT_CONCURRENCY})",
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    add_sampling_flags(parser, max_tokens=_DEFAULT_MAX_TOKENS)
    add_samples_flags(parser)
    add_grammar_flags(parser)
    add_server_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generates for all prompts. Returns 1 if one failed."""
    if args.concurrency < 1:
        raise ConfigError(f"concurrency is {args.concurrency}; it must be at least 1")
    params = structured_of(args, samples_of(args, sampling_of(args)))
    jobs = _jobs(args, params)
    if not jobs:
        raise ConfigError("there are no prompts; give them as arguments, by --input FILE or on stdin")
    with _target(args.output) as target, chosen_server(args) as server:
        return asyncio.run(_generate(server, jobs, target, args.concurrency, show_progress=not args.no_progress))


async def _generate(
    server: ChosenServer, jobs: Sequence[Job | OctavoError], target: TextIO, concurrency: int, *, show_progress: bool
) -> int:
    writer = OrderedWriter(target)
    places = [index for index, job in enumerate(jobs) if not isinstance(job, OctavoError)]
    async with AsyncClient(server.address, wait_for_server=True, **server.access) as client:
        await client.health(timeout=_HEALTH_TIMEOUT_S)  # one error, rather than the same one for each prompt
        with BatchProgress(len(jobs), enabled=show_progress) as progress:

            def take(index: int, result: Result) -> None:
                writer.take(index, result)
                progress.take(index, result)

            for index, job in enumerate(jobs):
                if isinstance(job, OctavoError):
                    take(index, job)
            await run_batch(
                client,
                [job for job in jobs if not isinstance(job, OctavoError)],
                max_concurrency=concurrency,
                keep_going=True,
                on_result=lambda place, result: take(places[place], result),
            )
    return 1 if writer.error_count else 0


def _jobs(args: argparse.Namespace, params: SamplingParams) -> list[Job | OctavoError]:
    """One job a prompt; a line that is none has its error in its place."""
    if args.prompts and args.input is not None:
        raise ConfigError("prompts are given as arguments and by --input; give one of them")
    lines = args.prompts or [line for line in _input_lines(args.input) if line.strip()]
    json_lines = args.input_format == "jsonl" or (args.input_format == "auto" and is_json_lines(lines))
    jobs: list[Job | OctavoError] = []
    for line in lines:
        try:
            jobs.append(json_job(line, params) if json_lines else plain_job(line, params, chat=args.chat))
        except OctavoError as error:
            jobs.append(error)
    return jobs


def _input_lines(path: str | None) -> list[str]:
    if path is None and sys.stdin.isatty():
        return []
    try:
        text = sys.stdin.read() if path in (None, "-") else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts from {path or 'stdin'}: {error}") from None
    # Not splitlines(): a prompt may hold a form feed or a Unicode line separator. \r\n is already \n here.
    return text.split("\n")


@contextlib.contextmanager
def _target(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        target = open(path, "w", encoding="utf-8")  # noqa: SIM115  (closed below; only the opening is guarded)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error}") from None
    with target:
        yield target
