"""Flags of `octavo generate` for structured output."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from octavo.errors import ConfigError
from octavo.types import SamplingParams, StructuredOutputsParams

_FLAGS = ("json_schema", "json_object", "regex", "choice", "grammar")


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the answers must match."""
    group = parser.add_argument_group("structured output", "What every answer must match; at most one of these.")
    group.add_argument("--json-schema", metavar="FILE", help="JSON that the schema in this file accepts")
    group.add_argument("--json-object", action="store_true", default=None, help="any JSON object")
    group.add_argument("--regex", metavar="REGEX", help="text that this regular expression matches as a whole")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of the texts given by several of these")
    group.add_argument("--grammar", metavar="FILE", help="text of the context-free grammar in this file, Lark or GBNF")


def structured_of(args: argparse.Namespace, params: SamplingParams) -> SamplingParams:
    """params with the structured output that was asked for. Raises ConfigError for two kinds, or no such file."""
    given = [name for name in _FLAGS if getattr(args, name) is not None]
    if not given:
        return params
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given[:2])
        raise ConfigError(f"{flags} are given; an answer matches one of them")
    name = "json" if given[0] == "json_schema" else given[0]
    value = getattr(args, given[0])
    if given[0] in ("json_schema", "grammar"):
        value = _text_of(given[0], value)
    return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(**{name: value}))


def _text_of(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{name.replace('_', '-')} {path} cannot be read: {error}") from None
