"""Puts a worker together from its settings: model, kernels, KV pool, executor, and what it tells about itself."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass

import numpy as np
import torch

from octavo.config import GIB, WorkerConfig
from octavo.errors import ConfigError
from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, BackendUnavailableError, KVLayout, load_backend
from octavo_worker import __version__
from octavo_worker.batch import build_batch
from octavo_worker.device import free_memory, resolve_device, resolve_dtype
from octavo_worker.executor import Executor
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.kv_pool import LAYOUT_NAME, KVPool, size_pool
from octavo_worker.loaders.checkpoint import Checkpoint, open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.memory import free_host_memory
from octavo_worker.models.decoder import Decoder
from octavo_worker.sequences import SequenceTable
from octavo_worker.session import PROTOCOL_VERSION
from octavo_worker.tokenizer import TokenizerBundle

_log = logging.getLogger(__name__)
_WARM_UP_TOKENS, _MEASURED_TOKENS = 16, 128
_WARM_UP_LIMIT_S = 0.15  # a model whose warm-up takes longer is not measured: it would hold up the start


@dataclass(frozen=True)
class Worker:
    """A worker that is ready to serve."""

    executor: Executor
    tokenizer: TokenizerBundle
    description: pb.DescribeResponse

    def summary(self) -> str:
        """One line for people."""
        about, memory = self.description.model, self.description.kv_memory
        size = memory.device_block_count * memory.bytes_per_block / GIB
        host = f" and {memory.host_block_count} on the host" if memory.host_block_count else ""
        return (
            f"model {about.name}, {about.dtype}, kernels {self.description.backend}, "
            f"KV pool {memory.device_block_count} blocks x {memory.block_size} tokens = {size:.2f} GiB{host}"
        )


def assemble(config: WorkerConfig, thread: ExecutorThread) -> Worker:
    """Loads everything. Runs in the executor's thread, whose tick it advances.

    Raises ModelLoadError for a model that cannot be found or read, ConfigError for a setting that does not fit the
    machine.
    """
    started = time.monotonic()
    # Loading is many short ops: on a busy machine torch's threads would wait for each other longer than they compute.
    torch.set_num_threads(1)
    device = resolve_device(config.device)
    backend = _load_backend(config, device)
    checkpoint = open_checkpoint(find_model(config.model))
    thread.advance()
    _log.info("loading %s from %s", checkpoint.source.name, checkpoint.source.path)
    digest = _InBackground(checkpoint)
    free_at_start = free_memory(device)
    dtype_name, dtype = resolve_dtype(config, checkpoint.config.dtype or checkpoint.weights.default_dtype())
    decoder = Decoder(
        checkpoint.config,
        checkpoint.weights,
        backend,
        dtype,
        num_sampled=min(checkpoint.config.vocab_size, checkpoint.tokenizer.size),
        on_progress=thread.advance,
    )
    _log.info("loaded %d parameters in %.1f s", decoder.num_parameters, time.monotonic() - started)
    if backend.name == "reference" and device.type == "cpu":
        torch.set_num_threads(_threads(config))  # the native kernels bring their own threads
    model = checkpoint.config
    layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, config.block_size, dtype)
    size = size_pool(
        config,
        layout,
        device,
        free_at_start=free_at_start,
        free_now=free_memory(device),
        free_host=free_host_memory(),
    )
    pool = KVPool(layout, size, backend)
    thread.advance()
    description = pb.DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        worker_name=config.worker_name,
        incarnation=secrets.randbits(64),
        model=pb.ModelInfo(
            name=checkpoint.source.name,
            digest=digest.result(),
            tokenizer_digest=checkpoint.tokenizer.digest,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            dtype=dtype_name,
            parameter_count=decoder.num_parameters,
        ),
        kv_memory=pb.KvMemoryInfo(
            block_size=config.block_size,
            device_block_count=size.num_device_blocks,
            host_block_count=size.num_host_blocks,
            bytes_per_block=layout.bytes_per_block,
            dtype=dtype_name,
            layout=LAYOUT_NAME,
        ),
        max_plans_in_flight=config.max_plans_in_flight,
        max_batched_token_count=config.max_num_batched_tokens,
        lease_ms=config.lease_ms,
        capabilities=[pb.CAPABILITY_SWAP] if size.num_host_blocks else [],
        prefill_tokens_per_s=_measure_prefill(decoder, pool, backend),
        backend=_describe_backend(config, backend),
        version=__version__,
    )
    executor = Executor(
        decoder, pool, backend, max_batched_tokens=config.max_num_batched_tokens, on_progress=thread.advance
    )
    return Worker(executor, checkpoint.tokenizer, description)


class _InBackground:
    """Computes a checkpoint's digest beside the loading of its weights; hashing lets other threads run."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._value = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(checkpoint,), name="digest", daemon=True)
        self._thread.start()

    def _run(self, checkpoint: Checkpoint) -> None:
        try:
            self._value = checkpoint.digest()
        except BaseException as error:
            self._error = error

    def result(self) -> str:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def _load_backend(config: WorkerConfig, device: torch.device) -> Backend:
    try:
        return load_backend(config.kernel_backend, device=device, num_threads=config.num_threads or None)
    except BackendUnavailableError as error:
        raise ConfigError(f"kernel_backend {config.kernel_backend!r}: {error}") from None


def _describe_backend(config: WorkerConfig, backend: Backend) -> str:
    """Backend, instruction set (where the backend tells it) or device, and threads; for people."""
    parts = [getattr(backend, "isa", None) or str(backend.device)]
    if backend.device.type == "cpu":
        parts.append(f"{_threads(config)} threads")
    return f"{backend.name} ({', '.join(parts)})"


def _threads(config: WorkerConfig) -> int:
    return config.num_threads or len(os.sched_getaffinity(0))


@torch.inference_mode()
def _measure_prefill(decoder: Decoder, pool: KVPool, backend: Backend) -> float:
    """Tokens of prompt a second, after a small pass that warms up; 0 where measuring would take long.

    It computes in the pool's first blocks, which hold nothing yet, and leaves zeros in them.
    """
    seconds = _time_pass(decoder, pool, backend, _WARM_UP_TOKENS)
    num_blocks = -(-_MEASURED_TOKENS // pool.layout.block_size)
    rate = 0.0
    if seconds < _WARM_UP_LIMIT_S and num_blocks <= pool.size.num_device_blocks:
        rate = _MEASURED_TOKENS / _time_pass(decoder, pool, backend, _MEASURED_TOKENS)
    pool.device[:num_blocks].zero_()
    return rate


def _time_pass(decoder: Decoder, pool: KVPool, backend: Backend, num_tokens: int) -> float:
    """Seconds that one prompt of this many tokens, or as many as fit, takes."""
    block_size = pool.layout.block_size
    num_tokens = min(num_tokens, pool.size.num_device_blocks * block_size, decoder.config.max_model_len)
    table = SequenceTable(1)
    tokens = (np.arange(num_tokens) % decoder.config.vocab_size).astype(np.int32)
    blocks = np.arange(-(-num_tokens // block_size), dtype=np.int32)
    row = np.array([table.put(0, tokens, blocks, num_tokens, pb.SequenceParams())])
    counts = np.array([num_tokens])
    batch = build_batch(table, row, np.zeros_like(counts), counts, block_size=block_size, device=backend.device)
    started = time.monotonic()
    logits = decoder.forward(
        batch.token_ids,
        batch.attention,
        pool.device,
        pool.layout,
        torch.tensor([num_tokens - 1], device=backend.device),
        prompt_lens=batch.prompt_lens,
    )
    logits.cpu()  # waits for the device
    return time.monotonic() - started
