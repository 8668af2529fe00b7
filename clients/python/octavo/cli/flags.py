"""Flags that several commands share: the model and the settings of a pair, and the sampling parameters."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any, Literal

from octavo.config import RouterConfig, WorkerConfig, pair_settings, setting_names
from octavo.errors import ConfigError
from octavo.types import SamplingParams

# How worker and router find each other is the pair's own affair.
PAIR_OWNED = ("listen", "worker", "ready_file")

_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 takes the likeliest token; higher is more varied"),
    ("top_p", float, "keep the smallest set of tokens whose probability reaches this"),
    ("top_k", int, "keep this many likeliest tokens; 0 keeps all"),
    ("min_p", float, "drop tokens less likely than this share of the likeliest"),
    ("presence_penalty", float, "lower the chance of tokens that the answer holds; -2 to 2"),
    ("frequency_penalty", float, "the same, for each time that the answer holds them; -2 to 2"),
    ("repetition_penalty", float, "above 1, make tokens that prompt or answer hold less likely"),
    ("seed", int, "the same seed gives the same tokens"),
)

_EARLY_STOPPING: dict[str, bool | Literal["never"]] = {"false": False, "true": True, "never": "never"}


def add_setting_flags(parser: argparse.ArgumentParser, *, skip: Collection[str] = ()) -> None:
    """Adds the settings of both programs, in one group each. A setting that both have stands with the worker's."""
    hidden = (*PAIR_OWNED, *skip)
    WorkerConfig.add_flags(parser, skip=hidden)
    RouterConfig.add_flags(parser, skip=hidden)


def settings_of(args: argparse.Namespace, **fixed: Any) -> tuple[WorkerConfig, RouterConfig]:
    """The settings that were given as flags or in the environment; `fixed` ones win."""
    names = setting_names()
    given = {name: value for name, value in vars(args).items() if name in names}
    model = getattr(args, "model_argument", None)
    if model is not None:
        if given.get("model", model) != model:
            raise ConfigError(f"the model is given twice: {model!r} and --model={given['model']!r}; give one")
        given["model"] = model
    return pair_settings({**given, **fixed})


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the positional MODEL, another way to say --model."""
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the model; the same as --model")


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Adds the sampling parameters; those that are not given are left to the model's defaults."""
    group = parser.add_argument_group("sampling", "What is not given is left to the model's own defaults.")
    for name, kind, text in _SAMPLING:
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=kind.__name__.upper(), help=text)
    shown = "up to the context's end" if max_tokens is None else max_tokens
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="INT",
        default=max_tokens,
        help=f"most tokens to generate for a prompt (default: {shown})",
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end where this text appears; may be given several times"
    )


def add_samples_flags(parser: argparse.ArgumentParser) -> None:
    """Adds how many answers a prompt gets, and how they are chosen."""
    group = parser.add_argument_group("samples", "How many answers a prompt gets, and beams instead of sampling.")
    group.add_argument("--n", type=int, default=1, metavar="INT", help="answers for each prompt (default: 1)")
    group.add_argument(
        "--best-of",
        type=int,
        metavar="INT",
        help="samples to generate, of which the n likeliest are answers (default: n)",
    )
    group.add_argument("--beam-width", type=int, metavar="INT", help="beam search with this many beams, not sampling")
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="FLOAT",
        help="beams: scores are divided by length to this power (default: 1)",
    )
    group.add_argument(
        "--early-stopping",
        choices=tuple(_EARLY_STOPPING),
        help="beams: end when a better one is unlikely, when beam-width of them have ended, or when no better one can "
        "exist (default: false)",
    )


def samples_of(args: argparse.Namespace, params: SamplingParams) -> SamplingParams:
    """params with the number of answers and how they are chosen. Raises ConfigError for half a beam search."""
    params = dataclasses.replace(params, n=args.n, best_of=args.best_of)
    given = {
        name: getattr(args, name) for name in ("length_penalty", "early_stopping") if getattr(args, name) is not None
    }
    if args.beam_width is None:
        for name in given:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is given without --beam-width, which asks for beam search")
        return params
    if "early_stopping" in given:
        given["early_stopping"] = _EARLY_STOPPING[given["early_stopping"]]
    return dataclasses.replace(params, use_beam_search=True, beam_width=args.beam_width, **given)


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that were given."""
    given = {name: getattr(args, name) for name, _, _ in _SAMPLING if getattr(args, name) is not None}
    defaults = SamplingParams.model_defaults(max_tokens=args.max_tokens)
    return dataclasses.replace(defaults, stop=args.stop, **given)
