"""Every setting of the two programs, declared once: name, default, range and help.

`octavo-worker` and `octavo-router` derive their flags and environment variables from the frozen classes here,
`octavo serve` and `LLM(...)` take the union of both and hand each program its own (`pair_settings`). This module knows
nothing of what the settings do; it only says which there are and what goes together. How they become flags and
variables is `settings`'s.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.settings import Settings, check_secret, environment_name, setting

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
GIB = 1 << 30
LINK_FILES = ("worker_ssl_keyfile", "worker_ssl_certfile", "worker_ssl_ca_certs")
PUBLIC_SETTINGS = (
    "api_key",
    "api_key_file",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
    "allow_credentials",
    "max_connections",
    "trust_request_chat_template",
)
"""Settings of a router that only matter where others can reach it."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/:?#@\[\]]+)(:[0-9]{1,5})?", re.IGNORECASE)


@dataclass(frozen=True)
class WorkerConfig(Settings):
    """What one worker is started with."""

    model: str = setting(
        DEFAULT_MODEL, "a folder with a checkpoint, a GGUF file, a hub id, or the name of an installed model"
    )
    listen: str = setting("127.0.0.1:50061", "address to serve the router on: HOST:PORT or unix:PATH")
    worker_name: str = setting("worker-0", "name of this worker, unique among a router's workers")
    dtype: str = setting(
        "auto",
        "data type of weights, activations and, unless kv_cache_dtype says otherwise, KV; auto takes the checkpoint's "
        "own, bfloat16 for GGUF",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = setting(
        "auto",
        "what linear layers compute in: none is dtype; int8 is 8-bit weights and activations; int4 is 4-bit weights, "
        "those of the file where it has them, with activations of dtype on a GPU and of 8 bits elsewhere; fp8 is "
        "weights and activations in 8-bit floats (e4m3), on a GPU or with kernel_backend reference; auto takes int8 "
        "for a quantized file where the kernels are made for it and dtype is not float32 or float16, otherwise none",
        choices=("auto", "none", "int8", "int4", "fp8"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "what K and V are kept in: auto is dtype; int8 is 8 bits and a scale for each token and head, about half the "
        "memory of bfloat16; fp8_e4m3 is the same in 8-bit floats, on a GPU or with kernel_backend reference",
        choices=("auto", "int8", "fp8_e4m3"),
    )
    device: str = setting("auto", "device to compute on", choices=("auto", "cpu", "cuda"))
    kernel_backend: str = setting(
        "auto",
        "kernels: auto takes the fastest that runs here and says which",
        choices=("auto", "cpu", "triton", "reference"),
    )
    attention_backend: str = setting(
        "", "own attention, as MODULE:CLASS, in place of the kernels'; see docs/attention.md"
    )
    enforce_eager: bool = setting(
        False, "compute decode steps on a GPU op by op, instead of by CUDA graphs that are recorded at start"
    )
    num_threads: int = setting(0, "compute threads; 0 takes the cores that this process may use", low=0, high=1024)
    block_size: int = setting(16, "tokens in a KV block: 8, 16 or 32", low=8, high=32)
    gpu_memory_utilization: float = setting(
        0.9,
        "share of the memory that is free at start which weights, KV and, on a GPU, the steps' own memory may take",
        low=0.01,
        high=1.0,
    )
    kv_cache_memory: float = setting(
        4.0, "most memory for KV blocks on a CPU device, in GiB; 0 is no cap", low=0.0, high=1 << 20
    )
    num_device_blocks: int = setting(0, "number of KV blocks on the device; 0 sizes the pool from free memory", low=0)
    swap_space: float = setting(
        1.0,
        "most memory of the host tier, where swapped-out sequences and evicted prefixes go, in GiB; taken as it is "
        "used on a CPU device, at start on another; less, with a line in the log, where less is free; 0 is no host "
        "tier",
        low=0.0,
        high=1 << 20,
    )
    max_num_batched_tokens: int = setting(
        0, "most tokens that one step computes; 0 takes 512 on a CPU device and 2048 on a GPU", low=0, high=1 << 20
    )
    max_plans_in_flight: int = setting(2, "plans taken before the first is answered; 1 is no lookahead", low=1, high=8)
    lease_ms: int = setting(10_000, "silence of the router after which its lease ends, in ms", low=100)
    worker_token: str = setting(
        "",
        "secret that routers and workers share: a worker that has one serves nobody who does not send it; better "
        "given as OCTAVO_WORKER_TOKEN than as a flag",
        secret=True,
    )
    worker_token_file: str = setting(
        "", "file that holds worker_token; a worker makes it, with a new token, where there is none"
    )
    worker_ssl_keyfile: str = setting(
        "", "private key (PEM) of this program's end of the connection between router and worker"
    )
    worker_ssl_certfile: str = setting("", "certificate (PEM) of this program's end of that connection")
    worker_ssl_ca_certs: str = setting(
        "", "certificates (PEM) of the authorities that sign the other end's; all three are given, or none"
    )
    log_level: str = setting("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))

    def validate(self) -> None:
        super().validate()
        if self.block_size not in (8, 16, 32):
            raise ConfigError(f"block_size is {self.block_size}; it must be 8, 16 or 32")
        _check_link(self)


@dataclass(frozen=True)
class RouterConfig(Settings):
    """What one router is started with."""

    worker: tuple[str, ...] = setting(("127.0.0.1:50061",), "address of a worker: HOST:PORT or unix:PATH")
    host: str = setting("127.0.0.1", "address to serve HTTP and gRPC on; 0.0.0.0 for all interfaces")
    port: int = setting(8000, "HTTP port; 0 picks a free one, -1 serves no HTTP", low=-1, high=65535)
    grpc_port: int = setting(50051, "gRPC port; 0 picks a free one, -1 serves no TCP", low=-1, high=65535)
    grpc_socket: str = setting("", "path of a Unix socket to serve gRPC on as well")
    served_model_name: tuple[str, ...] = setting((), "name clients use for the model; the first one is reported")
    max_model_len: int = setting(0, "most tokens of a request, prompt and output; 0 takes the model's", low=0)
    max_num_seqs: int = setting(256, "most sequences in one step", low=1, high=1 << 16)
    max_num_batched_tokens: int = setting(
        0, "most tokens that one step computes; 0 takes what the worker offers", low=0, high=1 << 20
    )
    enable_chunked_prefill: bool = setting(True, "split prompts over steps when a step's tokens do not suffice")
    enable_prefix_caching: bool = setting(True, "find computed blocks of equal prefixes again")
    max_plans_in_flight: int = setting(2, "plans sent before the first is answered; 1 is no lookahead", low=1, high=8)
    max_waiting_requests: int = setting(4096, "requests that may wait before new ones get 429; 0 is no limit", low=0)
    max_waiting_prompt_tokens: int = setting(
        2_000_000, "prompt tokens that may wait before new requests get 429; 0 is no limit", low=0
    )
    stream_interval_ms: int = setting(
        0,
        "least time between two messages of one stream, its first and last apart: tokens that come meanwhile join, and "
        "none waits for more than twice as long; spares both ends work where steps are short",
        low=0,
        high=10_000,
    )
    max_request_bytes: int = setting(32 << 20, "largest request body or message, in bytes", low=1024)
    tokenizer_threads: int = setting(2, "threads that tokenize and render templates", low=1, high=64)
    step_timeout_s: float = setting(
        30.0, "time without progress of the worker's executor after which its session is given up, in s", low=0.1
    )
    max_worker_failures: int = setting(
        3, "deaths of the worker in a request's steps, twice with no other, after which it fails", low=1, high=100
    )
    worker_timeout_s: float = setting(
        60.0, "time without a worker after which requests fail with UNAVAILABLE, in s", low=0.1
    )
    grace_period_s: float = setting(30.0, "time that running requests get to finish after SIGTERM, in s", low=0.0)
    chat_template: str = setting(
        "", "Jinja chat template to use instead of the model's: a path, or hermes for one with tools that comes along"
    )
    tool_call_parser: str = setting(
        "auto",
        "how the model writes tool calls; auto takes what its chat template says",
        choices=("auto", "hermes", "llama3_json", "mistral", "pythonic"),
    )
    trust_request_chat_template: bool = setting(
        False,
        "take chat templates from requests; they are rendered in a process of their own with little time and memory",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "key that clients must send as `Authorization: Bearer KEY`; without any, everybody is served. Better given as "
        "OCTAVO_API_KEY (several are separated by commas) or in api_key_file than as a flag, which other users can see",
        secret=True,
    )
    api_key_file: str = setting("", "file with more keys, one a line, # begins a comment; read again when it changes")
    ssl_keyfile: str = setting("", "private key (PEM) to serve HTTPS and gRPC over TLS with")
    ssl_certfile: str = setting("", "certificate (PEM) of the server, with those that lead to its authority")
    ssl_ca_certs: str = setting("", "certificates (PEM) of the authorities that sign clients' certificates")
    ssl_cert_reqs: int = setting(
        0, "2 serves only clients with a certificate signed by ssl_ca_certs, 0 asks for none", choices=(0, 2)
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "web origin that browsers may call from, such as https://chat.example.com, or *; none: no CORS headers"
    )
    allowed_methods: tuple[str, ...] = setting(("*",), "HTTP method that those origins may use")
    allowed_headers: tuple[str, ...] = setting(("*",), "request header that those origins may send")
    allow_credentials: bool = setting(False, "let browsers send cookies and client certificates from those origins")
    max_connections: int = setting(
        0,
        "most connections at a time, over HTTP and over gRPC; 0 takes what the limit on open files leaves room for",
        low=0,
        high=1 << 20,
    )
    worker_token: str = setting(
        "",
        "secret that routers and workers share: a worker that has one serves nobody who does not send it; better "
        "given as OCTAVO_WORKER_TOKEN than as a flag",
        secret=True,
    )
    worker_token_file: str = setting(
        "", "file that holds worker_token; a worker makes it, with a new token, where there is none"
    )
    worker_ssl_keyfile: str = setting(
        "", "private key (PEM) of this program's end of the connection between router and worker"
    )
    worker_ssl_certfile: str = setting("", "certificate (PEM) of this program's end of that connection")
    worker_ssl_ca_certs: str = setting(
        "", "certificates (PEM) of the authorities that sign the other end's; all three are given, or none"
    )
    ready_file: str = setting(
        "", 'file that is written once the router serves: JSON with the addresses, {"http": ..., "grpc": ...}'
    )
    router_name: str = setting("router-0", "name of this router, in the workers' logs")
    log_level: str = setting("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))

    def validate(self) -> None:
        super().validate()
        for key in self.api_key:
            check_secret("api_key", key)
        _check_tls(self)
        _check_cors(self)
        _check_link(self)


def _check_tls(config: RouterConfig) -> None:
    if bool(config.ssl_keyfile) != bool(config.ssl_certfile):
        given, missing = ("ssl_keyfile", "ssl_certfile") if config.ssl_keyfile else ("ssl_certfile", "ssl_keyfile")
        raise ConfigError(f"{given} is given without {missing}; TLS needs both")
    if config.ssl_ca_certs and not config.ssl_keyfile:
        raise ConfigError("ssl_ca_certs is given without ssl_keyfile and ssl_certfile; TLS needs them")
    if config.ssl_ca_certs and not config.ssl_cert_reqs:
        raise ConfigError(
            "ssl_ca_certs is given, but ssl_cert_reqs is 0, which asks clients for no certificate; set it to 2"
        )
    if config.ssl_cert_reqs and not config.ssl_ca_certs:
        raise ConfigError(
            f"ssl_cert_reqs is {config.ssl_cert_reqs} without ssl_ca_certs, which says whose certificates are good"
        )


def _check_cors(config: RouterConfig) -> None:
    for origin in config.allowed_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"allowed_origins has {origin!r}; each is * or SCHEME://HOST[:PORT], without a path; give the flag "
                "once for each"
            )
    if config.allow_credentials and "*" in config.allowed_origins:
        raise ConfigError(
            "allow_credentials is set while allowed_origins has *: any web page could act as the user who views it; "
            "name the origins"
        )


def _check_link(config: WorkerConfig | RouterConfig) -> None:
    if config.worker_token and config.worker_token_file:
        raise ConfigError("worker_token and worker_token_file are both given; give one")
    if config.worker_token:
        check_secret("worker_token", config.worker_token)
    files = {name: getattr(config, name) for name in LINK_FILES}
    if any(files.values()) and not all(files.values()):
        missing = ", ".join(name for name, path in files.items() if not path)
        raise ConfigError(f"{missing} is missing; router and worker prove each other who they are by all three files")


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


def private_settings() -> dict[str, Any]:
    """Settings of a router that works for one program alone, over a socket that only its user can open: whatever the
    environment says, there are no ports, nobody is asked for a key, and the program may bring its own chat templates.
    """
    fixed = {spec.name: spec.default for spec in dataclasses.fields(RouterConfig) if spec.name in PUBLIC_SETTINGS}
    return fixed | {"port": -1, "grpc_port": -1, "trust_request_chat_template": True}


def quiet_log_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """The log level of a pair that works for one program and not as a server: warnings, unless the environment says."""
    return None if environment_name("log_level") in environ else "warning"
