"""How a program's settings are declared, and turned into flags, environment variables and checked values.

A setting `max_num_seqs` is the flag `--max-num-seqs` and the environment variable `OCTAVO_MAX_NUM_SEQS`; the flag wins.
Secret settings (keys and tokens) reach a child process by its environment, never by its flags, which every user of the
machine can read; no message and no repr shows them. Which settings there are is `config`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from octavo.errors import ConfigError

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str | int] | None = None,
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
) -> Any:
    """A field with its flag's help text and range, both ends included. A tuple default makes a repeatable flag."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Base of the settings classes: flags in, checked values out, flags again for a child process."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises ConfigError that names the first key whose value is out of range."""
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if isinstance(spec.default, tuple) and not isinstance(value, tuple):
                shown = type(value).__name__ if spec.metadata["secret"] else repr(value)
                raise ConfigError(f"{spec.name} is {shown}; it must be a tuple of texts")
            for item in value if isinstance(value, tuple) else (value,):
                _check(spec, item, _type_of(type(self), spec.name))

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser, skip: Sequence[str] = ()) -> None:
        """Adds a flag for each setting but those in `skip`. Flags that were not given are left out of the namespace."""
        group = parser.add_argument_group(cls.__name__.removesuffix("Config").lower())
        for spec in dataclasses.fields(cls):
            flag = _flag(spec.name)
            if spec.name in skip or flag in parser._option_string_actions:
                continue
            kind = _type_of(cls, spec.name)
            help_text = f"{spec.metadata['help']} (default: {_shown(spec.default)})".replace("%", "%%")
            if kind is bool:
                group.add_argument(
                    flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
                )
                continue
            repeat: dict[str, Any] = {"action": "append"} if isinstance(spec.default, tuple) else {}
            group.add_argument(
                flag,
                type=kind,
                choices=spec.metadata["choices"],
                default=argparse.SUPPRESS,
                metavar=None if spec.metadata["choices"] else kind.__name__.upper(),
                help=help_text,
                **repeat,
            )

    @classmethod
    def from_values(cls, values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Self:
        """Settings from given values (a namespace's or keyword arguments), then the environment, then the defaults.

        Raises ConfigError for a value that is out of range or an environment variable that cannot be read.
        """
        chosen: dict[str, Any] = {}
        for spec in dataclasses.fields(cls):
            if values.get(spec.name) is not None:
                chosen[spec.name] = _given(spec, values[spec.name])
            elif (text := environ.get(environment_name(spec.name))) is not None:
                chosen[spec.name] = _from_text(cls, spec, text)
        return cls(**chosen)

    def to_flags(self) -> list[str]:
        """The flags that give these settings again, with `to_environment`; settings at their default are left out."""
        flags: list[str] = []
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value == spec.default or value is None or spec.metadata["secret"]:
                continue
            if isinstance(value, bool):
                flags.append(_flag(spec.name) if value else f"--no-{_flag(spec.name)[2:]}")
                continue
            for item in value if isinstance(value, tuple) else (value,):
                flags.append(f"{_flag(spec.name)}={item}")
        return flags

    def to_environment(self) -> dict[str, str]:
        """The environment variables that give the secret settings again; those at their default are left out."""
        variables: dict[str, str] = {}
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.metadata["secret"] and value != spec.default:
                variables[environment_name(spec.name)] = ",".join(value) if isinstance(value, tuple) else value
        return variables


def check_secret(name: str, value: str) -> None:
    """Raises ConfigError, which does not show the value, unless it can be sent as a bearer token and listed."""
    if not value or not all("!" <= character <= "~" and character != "," for character in value):
        raise ConfigError(
            f"{name} must be printable ASCII without spaces and commas, and not empty; "
            "`openssl rand -hex 32` makes a good one"
        )


def environment_name(name: str) -> str:
    """The environment variable of a setting."""
    return f"OCTAVO_{name.upper()}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _type_of(cls: type[Settings], name: str) -> type:
    """The type of one value of a setting: of `tuple[str, ...]` it is str."""
    hint = typing.get_type_hints(cls)[name]
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.cast(type, hint)


def _from_text(cls: type[Settings], spec: dataclasses.Field[Any], text: str) -> Any:
    kind = _type_of(cls, spec.name)
    name = environment_name(spec.name)
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        if isinstance(spec.default, tuple):
            parts = tuple(kind(part) for part in text.split(",") if part)
            if text and not parts and spec.metadata["secret"]:  # variables in it that are not set must not open a door
                raise ConfigError(
                    f"environment variable {name} holds nothing but commas; leave it out, or give a value"
                )
            return parts
        return kind(text)
    except (ValueError, KeyError):
        raise ConfigError(
            f"environment variable {name} is {text!r}; it must be {_KINDS.get(kind, kind.__name__)}"
        ) from None


def _given(spec: dataclasses.Field[Any], value: Any) -> Any:
    """A value as a caller or argparse gave it: one text or a list stands for a tuple, a path for its text."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(spec.default, tuple):
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    return value


def _check(spec: dataclasses.Field[Any], value: Any, kind: type) -> None:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        shown = type(value).__name__ if spec.metadata["secret"] else repr(value)
        raise ConfigError(f"{spec.name} is {shown}; it must be {_KINDS.get(kind, kind.__name__)}")
    low, high, choices = spec.metadata["low"], spec.metadata["high"], spec.metadata["choices"]
    if choices is not None and value not in choices:
        raise ConfigError(f"{spec.name} is {value!r}; it must be one of {', '.join(map(str, choices))}")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        ends = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise ConfigError(f"{spec.name} is {value}; it must be {ends}")


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ", ".join(map(str, default)) or "none"
    return str(default) if default != "" else "none"
