"""The program `octavo-worker`: reads settings, loads a model and serves it until it is told to stop.

    octavo-worker [--model M] [--listen ADDRESS] …   serves
    octavo-worker kv-size [--model M] …              prints the KV memory a model needs, as JSON

Exit codes: 0 after SIGINT or SIGTERM, 2 for a setting or a model that cannot be used, with one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo import event_loop
from octavo.config import DEFAULT_MODEL, WorkerConfig
from octavo.errors import ConfigError, ModelLoadError
from octavo.garbage import spare_long_lived
from octavo_worker import __version__

if TYPE_CHECKING:
    import grpc

    from octavo_worker.assembly import Worker
    from octavo_worker.executor_thread import ExecutorThread

_log = logging.getLogger("octavo_worker")
_STOP_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["kv-size"]:
            return _kv_size(arguments[1:])
        config = WorkerConfig.from_values(vars(_parser().parse_args(arguments)))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(0))  # until the server takes over, there is nothing to clean up
        _configure_logging(config.log_level)
        return event_loop.run(_serve(config))
    except (ConfigError, ModelLoadError) as error:
        print(f"octavo-worker: {error.message}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo-worker",
        description="Holds a model and its paged KV memory and computes the steps that a router orders. "
        "`octavo-worker kv-size` tells a model's KV memory.",
    )
    parser.add_argument("--version", action="version", version=f"octavo-worker {__version__}")
    WorkerConfig.add_flags(parser)
    return parser


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )


async def _serve(config: WorkerConfig) -> int:
    """Binds the address first, so that one in use fails at once, then loads and serves until a signal comes."""
    from octavo_worker.executor_thread import ExecutorThread
    from octavo_worker.listen import Access, bind, make_server

    has_failed = False
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    access = Access.of(config)
    server = make_server(access)
    with bind(server, config.listen, access) as address:
        thread = ExecutorThread()
        loading = asyncio.wrap_future(thread.submit(lambda: _load(config, thread)))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            worker = loading.result()
            has_failed = await _run_server(server, worker, thread, config, address, stop)
    if not thread.stop(_STOP_S):
        logging.shutdown()
        os._exit(int(has_failed))  # the executor is inside a load or a step, and nothing waits for it
    return int(has_failed)


def _load(config: WorkerConfig, thread: ExecutorThread) -> Worker:
    """Finds the model before torch is imported, which takes most of the start."""
    from octavo_worker.loaders.source import find_model

    source = find_model(config.model)
    from octavo_kernels import KernelError
    from octavo_worker.assembly import assemble

    try:
        return assemble(config, source, thread)
    except KernelError as error:
        raise ModelLoadError(
            f"model {source.name} cannot be computed with the kernels that were chosen: {error}; "
            "--kernel-backend reference takes any shape, slowly"
        ) from None


async def _run_server(
    server: grpc.aio.Server,
    worker: Worker,
    thread: ExecutorThread,
    config: WorkerConfig,
    address: str,
    stop: asyncio.Event,
) -> bool:
    """Serves until it is to stop, or the device fails. Returns whether the latter."""
    from octavo_worker.server import WorkerServicer, add_services
    from octavo_worker.session import Lease

    lease = Lease(worker.description.incarnation, config.lease_ms / 1000, config.max_plans_in_flight)
    servicer = WorkerServicer(worker.executor, thread, lease, worker.description, worker.tokenizer)
    health = await add_services(server, servicer)
    await server.start()
    spare_long_lived()
    _log.info("%s ready on %s: %s", config.worker_name, address, worker.summary())
    ends = [asyncio.create_task(event.wait()) for event in (stop, servicer.device_failed)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    _log.info("shutting down")
    await health.enter_graceful_shutdown()
    servicer.stop()
    await server.stop(grace=_STOP_S)
    return servicer.device_failed.is_set()


def _kv_size(arguments: list[str]) -> int:
    """Prints the KV memory that a model needs. Reads only the model's config."""
    from octavo_worker.loaders.checkpoint import read_config
    from octavo_worker.loaders.config import DTYPE_BYTES, KV_SCALE_BYTES, QUANTIZED_KV_DTYPES
    from octavo_worker.loaders.source import find_model

    parser = argparse.ArgumentParser(prog="octavo-worker kv-size", description="Tells a model's KV memory, as JSON.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for octavo-worker (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPE_BYTES), help="the model's data type")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", *QUANTIZED_KV_DTYPES), help="auto is the model's"
    )
    parser.add_argument("--block-size", type=int, default=16, choices=(8, 16, 32), help="tokens in a block")
    parser.add_argument("--tokens", type=int, default=0, help="a number of tokens to tell the size for")
    options = parser.parse_args(arguments)
    if options.tokens < 0:
        raise ConfigError(f"tokens is {options.tokens}; it must be 0 or more")
    source = find_model(options.model, only_config=True)
    config = read_config(source)
    dtype = (config.dtype or "float32") if options.dtype == "auto" else options.dtype
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"the checkpoint's dtype is {dtype!r}; give --dtype, one of {', '.join(DTYPE_BYTES)}")
    is_quantized = options.kv_cache_dtype in QUANTIZED_KV_DTYPES
    kv_dtype = options.kv_cache_dtype if is_quantized else dtype
    per_token = config.kv_bytes_per_token(kv_dtype)
    answer = {
        "model": source.name,
        "dtype": kv_dtype,
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "bytes_per_element": 1 if is_quantized else DTYPE_BYTES[dtype],
        "scale_bytes_per_head": KV_SCALE_BYTES if is_quantized else 0,
        "block_size": options.block_size,
        "bytes_per_token": per_token,
        "bytes_per_block": per_token * options.block_size,
        "max_model_len": config.max_model_len,
        "bytes_per_max_model_len": per_token * -(-config.max_model_len // options.block_size) * options.block_size,
    }
    if options.tokens:
        answer["tokens"] = options.tokens
        answer["bytes"] = per_token * -(-options.tokens // options.block_size) * options.block_size
    print(json.dumps(answer))
    return 0
