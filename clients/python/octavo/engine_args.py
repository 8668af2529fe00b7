"""`EngineArgs`: the settings of a pair of programs that works for one Python program, under vLLM's names.

`LLM` and `AsyncLLMEngine` are made of it. What a setting means, its default and its range are in `config`; here is
which of them an engine takes, and what to do instead where vLLM has a setting and Octavo has not.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from typing import Any, Self

from octavo.config import (
    DEFAULT_MODEL,
    PUBLIC_SETTINGS,
    RouterConfig,
    WorkerConfig,
    pair_settings,
    private_settings,
    quiet_log_level,
    setting_names,
)
from octavo.errors import ConfigError

# What only makes sense where others connect, or is the pair's own to decide.
_PAIR_OWNED = frozenset(
    {"listen", "worker", "host", "port", "grpc_port", "grpc_socket", "ready_file", *PUBLIC_SETTINGS}
)
_SETTINGS = setting_names() - _PAIR_OWNED
_LIST = ", ".join(sorted(_SETTINGS))

# Settings of vLLM that people bring along: the values that ask for what is the case anyway, which are taken, and what
# to do instead of the others. None is always taken.
_FOREIGN: dict[str, tuple[tuple[Any, ...], str]] = {
    "cpu_offload_gb": ((0,), "weights stay on the device; leave it out"),
    "disable_custom_all_reduce": ((True, False), ""),
    "disable_log_requests": ((True,), "requests are never logged; leave it out"),
    "disable_log_stats": ((True,), "nothing is logged until you call print_stats(); leave it out"),
    "distributed_executor_backend": ((), "one worker computes on one device; leave it out"),
    "download_dir": ((), "set the environment variable HF_HOME"),
    "enable_log_requests": ((False,), "requests are never logged; leave it out"),
    "enable_lora": ((False,), "adapters are not offered yet; leave it out"),
    "engine_use_ray": ((False,), "the engine is always processes of its own; leave it out"),
    "hf_token": ((), "set the environment variable HF_TOKEN"),
    "limit_mm_per_prompt": ((), "models take text alone; leave it out"),
    "load_format": (("auto",), "the model's files say what they are; leave it out"),
    "max_logprobs": ((20,), "the limit is 20; leave it out"),
    "pipeline_parallel_size": ((1,), "one worker computes on one device; leave it out"),
    "revision": ((), "give the folder of a checkpoint, or a hub id"),
    "tensor_parallel_size": ((1,), "one worker computes on one device; leave it out"),
    "tokenizer": ((), "the model's own tokenizer is used; leave it out"),
    "tokenizer_mode": (("auto",), "the model's own tokenizer is used; leave it out"),
    "trust_remote_code": ((False,), "code that comes with a model is never run; leave it out"),
    "worker_use_ray": ((False,), "the engine is always processes of its own; leave it out"),
}


class EngineArgs:
    """What an engine is started with: a model and any setting of `octavo serve` that is not about serving others.

        EngineArgs(model="SmolLM2-135M-Instruct", dtype="float32", max_model_len=2048, max_num_seqs=64)

    A setting that is left out, or None, comes from its environment variable (OCTAVO_MAX_NUM_SEQS), else it is the
    default. All are checked at once and can be read back as attributes. With `seed`, requests without a seed of their
    own get one derived from it. Immutable.

    `attention_class` is `attention_backend` as a class, which the worker must be able to import, or as its name.

    A setting of vLLM's that Octavo has not is taken where its value asks for what is the case anyway. Raises TypeError
    for any other unknown setting, with a hint, and ConfigError for a value out of range.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        seed: int | None = None,
        attention_class: type | str | None = None,
        **settings: Any,
    ) -> None:
        if attention_class is not None:
            settings.setdefault("attention_backend", _import_name(attention_class))
        for name, value in settings.items():
            _check_known(name, value)
        known = {name: value for name, value in settings.items() if name in _SETTINGS}
        given = {"log_level": quiet_log_level(), **known, "model": model, **private_settings()}
        worker, router = pair_settings(given)
        for name, value in (("worker_config", worker), ("router_config", router), ("seed", seed)):
            object.__setattr__(self, name, value)

    worker_config: WorkerConfig
    router_config: RouterConfig
    seed: int | None

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            config = self.router_config if hasattr(RouterConfig, name) else self.worker_config
            return getattr(config, name)
        raise AttributeError(f"EngineArgs has no setting {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"EngineArgs cannot be changed; make a new one with {name}={value!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EngineArgs):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        given = {"model": self.model, "seed": self.seed}
        for config in (self.worker_config, self.router_config):
            for spec in dataclasses.fields(config):
                value = getattr(config, spec.name)
                if spec.name in _SETTINGS and value != spec.default and not spec.metadata["secret"]:
                    given[spec.name] = value
        return f"EngineArgs({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def _key(self) -> tuple[WorkerConfig, RouterConfig, int | None]:
        return self.worker_config, self.router_config, self.seed

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each setting that the parser has none for yet, and returns the parser."""
        for config in (WorkerConfig, RouterConfig):
            config.add_flags(parser, skip=tuple(_PAIR_OWNED))
        if "--seed" not in parser._option_string_actions:
            parser.add_argument("--seed", type=int, help="requests without a seed get one derived from this")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The settings among parsed arguments; what else the namespace holds is the caller's."""
        given = {name: value for name, value in vars(args).items() if name in _SETTINGS and name != "model"}
        return cls(getattr(args, "model", None) or DEFAULT_MODEL, seed=getattr(args, "seed", None), **given)


AsyncEngineArgs = EngineArgs


def _import_name(attention_class: type | str) -> str:
    """MODULE:CLASS of a class, for a process that imports it. Raises ConfigError for one that no other can import."""
    if isinstance(attention_class, str):
        return attention_class
    module, name = attention_class.__module__, attention_class.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"attention_class is {module}.{name}; the worker is a process of its own and must be able to import the "
            "class: put it into a module"
        )
    return f"{module}:{name}"


def _check_known(name: str, value: Any) -> None:
    """Raises TypeError, with what to do, for a name that is no setting of an engine and asks for something."""
    neutral, hint = _FOREIGN.get(name, ((), ""))
    if name in _SETTINGS or (name in _FOREIGN and (value is None or value in neutral)):
        return
    if neutral:
        allowed = " or ".join(map(repr, neutral))
        raise TypeError(f"an engine takes {name} only as {allowed}, and it is {value!r}{hint and f': {hint}'}")
    if name in _PAIR_OWNED:
        hint = "it says how others are served; `octavo serve` takes it"
    elif not hint and (close := difflib.get_close_matches(name, sorted(_SETTINGS), n=1)):
        hint = f"did you mean {close[0]}?"
    raise TypeError(f"an engine has no setting {name!r}: {hint or f'settings are {_LIST}'}")
