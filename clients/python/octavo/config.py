"""Every setting of the two programs, declared once: name, default, range and help.

`octavo-worker` and `octavo-router` derive their flags and environment variables from the frozen classes here,
`octavo serve` and `LLM(...)` take the union of both and hand each program its own (`pair_settings`). This module knows
nothing of what the settings do; it only parses and checks them.

A setting `max_num_seqs` is the flag `--max-num-seqs` and the environment variable `OCTAVO_MAX_NUM_SEQS`; the flag wins.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from octavo.errors import ConfigError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
GIB = 1 << 30

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A field with its flag's help text and range, both ends included. A tuple default makes a repeatable flag."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


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
                raise ConfigError(f"{spec.name} is {value!r}; it must be a tuple of texts")
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
        """The flags that give these settings again; settings at their default are left out."""
        flags: list[str] = []
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value == spec.default or value is None:
                continue
            if isinstance(value, bool):
                flags.append(_flag(spec.name) if value else f"--no-{_flag(spec.name)[2:]}")
                continue
            for item in value if isinstance(value, tuple) else (value,):
                flags.append(f"{_flag(spec.name)}={item}")
        return flags


@dataclass(frozen=True)
class WorkerConfig(Settings):
    """What one worker is started with."""

    model: str = _setting(
        DEFAULT_MODEL, "a folder with a checkpoint, a GGUF file, a hub id, or the name of an installed model"
    )
    listen: str = _setting("127.0.0.1:50061", "address to serve the router on: HOST:PORT or unix:PATH")
    worker_name: str = _setting("worker-0", "name of this worker, unique among a router's workers")
    dtype: str = _setting(
        "auto",
        "data type of weights, activations and KV; auto takes the checkpoint's own, bfloat16 for GGUF",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = _setting("auto", "device to compute on", choices=("auto", "cpu", "cuda"))
    kernel_backend: str = _setting(
        "auto", "kernels: auto takes the fastest that runs here and says which", choices=("auto", "cpu", "reference")
    )
    num_threads: int = _setting(0, "compute threads; 0 takes the cores that this process may use", low=0, high=1024)
    block_size: int = _setting(16, "tokens in a KV block: 8, 16 or 32", low=8, high=32)
    gpu_memory_utilization: float = _setting(
        0.9, "share of the memory that is free at start which weights and KV may take", low=0.01, high=1.0
    )
    kv_cache_memory: float = _setting(
        4.0, "most memory for KV blocks on a CPU device, in GiB; 0 is no cap", low=0.0, high=1 << 20
    )
    num_device_blocks: int = _setting(0, "number of KV blocks on the device; 0 sizes the pool from free memory", low=0)
    swap_space: float = _setting(
        1.0,
        "most memory of the host tier, where swapped-out sequences and evicted prefixes go, in GiB; taken as it is "
        "used on a CPU device, at start on another; less, with a line in the log, where less is free; 0 is no host "
        "tier",
        low=0.0,
        high=1 << 20,
    )
    max_num_batched_tokens: int = _setting(512, "most tokens that one step computes", low=1, high=1 << 20)
    max_plans_in_flight: int = _setting(2, "plans taken before the first is answered; 1 is no lookahead", low=1, high=8)
    lease_ms: int = _setting(10_000, "silence of the router after which its lease ends, in ms", low=100)
    log_level: str = _setting("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))

    def validate(self) -> None:
        super().validate()
        if self.block_size not in (8, 16, 32):
            raise ConfigError(f"block_size is {self.block_size}; it must be 8, 16 or 32")


@dataclass(frozen=True)
class RouterConfig(Settings):
    """What one router is started with."""

    worker: tuple[str, ...] = _setting(("127.0.0.1:50061",), "address of a worker: HOST:PORT or unix:PATH")
    host: str = _setting("127.0.0.1", "address to serve HTTP and gRPC on; 0.0.0.0 for all interfaces")
    port: int = _setting(8000, "HTTP port; 0 picks a free one, -1 serves no HTTP", low=-1, high=65535)
    grpc_port: int = _setting(50051, "gRPC port; 0 picks a free one, -1 serves no TCP", low=-1, high=65535)
    grpc_socket: str = _setting("", "path of a Unix socket to serve gRPC on as well")
    served_model_name: tuple[str, ...] = _setting((), "name clients use for the model; the first one is reported")
    max_model_len: int = _setting(0, "most tokens of a request, prompt and output; 0 takes the model's", low=0)
    max_num_seqs: int = _setting(256, "most sequences in one step", low=1, high=1 << 16)
    max_num_batched_tokens: int = _setting(512, "most tokens that one step computes", low=1, high=1 << 20)
    enable_chunked_prefill: bool = _setting(True, "split prompts over steps when a step's tokens do not suffice")
    enable_prefix_caching: bool = _setting(True, "find computed blocks of equal prefixes again")
    max_plans_in_flight: int = _setting(2, "plans sent before the first is answered; 1 is no lookahead", low=1, high=8)
    max_waiting_requests: int = _setting(4096, "requests that may wait before new ones get 429; 0 is no limit", low=0)
    max_waiting_prompt_tokens: int = _setting(
        2_000_000, "prompt tokens that may wait before new requests get 429; 0 is no limit", low=0
    )
    max_request_bytes: int = _setting(32 << 20, "largest request body or message, in bytes", low=1024)
    tokenizer_threads: int = _setting(2, "threads that tokenize and render templates", low=1, high=64)
    step_timeout_s: float = _setting(
        30.0, "time without progress of the worker's executor after which its session is given up, in s", low=0.1
    )
    worker_timeout_s: float = _setting(
        60.0, "time without a worker after which requests fail with UNAVAILABLE, in s", low=0.1
    )
    grace_period_s: float = _setting(30.0, "time that running requests get to finish after SIGTERM, in s", low=0.0)
    chat_template: str = _setting("", "path of a Jinja chat template to use instead of the model's")
    ready_file: str = _setting(
        "", 'file that is written once the router serves: JSON with the addresses, {"http": ..., "grpc": ...}'
    )
    router_name: str = _setting("router-0", "name of this router, in the workers' logs")
    log_level: str = _setting("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))


def pair_settings(
    values: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> tuple[WorkerConfig, RouterConfig]:
    """Settings of both programs from the union of their names; a setting that both have goes to both.

    Raises ConfigError as `Settings.from_values` does, and for a name that neither program has.
    """
    names = setting_names()
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; settings are {', '.join(sorted(names))}"
            raise ConfigError(f"there is no setting {name!r}{hint}")
    return WorkerConfig.from_values(values, environ), RouterConfig.from_values(values, environ)


def setting_names() -> frozenset[str]:
    """The names of every setting of either program."""
    return frozenset(spec.name for cls in (WorkerConfig, RouterConfig) for spec in dataclasses.fields(cls))


def quiet_log_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """The log level of a pair that works for one program and not as a server: warnings, unless the environment says."""
    return None if environment_name("log_level") in environ else "warning"


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
            return tuple(kind(part) for part in text.split(",") if part)
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
        raise ConfigError(f"{spec.name} is {value!r}; it must be {_KINDS.get(kind, kind.__name__)}")
    low, high, choices = spec.metadata["low"], spec.metadata["high"], spec.metadata["choices"]
    if choices is not None and value not in choices:
        raise ConfigError(f"{spec.name} is {value!r}; it must be one of {', '.join(choices)}")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        ends = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise ConfigError(f"{spec.name} is {value}; it must be {ends}")


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ", ".join(map(str, default)) or "none"
    return str(default) if default != "" else "none"
