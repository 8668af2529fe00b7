"""Puts a worker together from its settings: model, kernels, KV pool, executor, and what it tells about itself."""

from __future__ import annotations

import logging
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from octavo.config import GIB, WorkerConfig
from octavo.errors import ConfigError
from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, BackendUnavailableError, load_backend
from octavo_kernels.cpu.topology import usable_cores
from octavo_worker import __version__
from octavo_worker.custom_attention import with_attention
from octavo_worker.device import resolve_batched_tokens, resolve_dtype, resolve_kv_dtype, resolve_quantization
from octavo_worker.devices import find_device
from octavo_worker.executor import Executor
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.grammar import GrammarEngine, GrammarUnavailableError
from octavo_worker.kv_pool import KVPool, layout_name, size_pool
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import ModelSource
from octavo_worker.measurement import measure_prefill, measure_swap
from octavo_worker.memory import check_weights_fit, free_host_memory, keep_freed_memory, weight_bytes
from octavo_worker.models.decoder import Decoder
from octavo_worker.models.layers import Quantization
from octavo_worker.preparation import NUM_SCRATCH_BLOCKS, memory_of_steps, prepare, runs_ahead
from octavo_worker.session import PROTOCOL_VERSION
from octavo_worker.tokenizer import TokenizerBundle

_log = logging.getLogger(__name__)
# Computing masks of grammars: more threads wait for each other longer than they compute.
_MOST_GRAMMAR_THREADS = 8


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
        kv_dtype = f" in {memory.dtype}" if memory.dtype != about.dtype else ""
        return (
            f"model {about.name}, {about.dtype}, kernels {self.description.backend}, "
            f"KV pool {memory.device_block_count} blocks x {memory.block_size} tokens{kv_dtype} = {size:.2f} GiB{host}"
        )


def assemble(config: WorkerConfig, source: ModelSource, thread: ExecutorThread) -> Worker:
    """Loads everything. Runs in the executor's thread, whose tick it advances.

    Raises ModelLoadError for a model that cannot be found or read, ConfigError for a setting that does not fit the
    machine.
    """
    started = time.monotonic()
    # Loading is many short ops: on a busy machine torch's threads would wait for each other longer than they compute.
    torch.set_num_threads(1)
    device = find_device(config.device)
    config = replace(config, max_num_batched_tokens=resolve_batched_tokens(config, device))
    backend = _load_backend(config, device.torch_device)
    checkpoint = open_checkpoint(source)
    thread.advance()
    _log.info("loading %s from %s", checkpoint.source.name, checkpoint.source.path)
    helpers = ThreadPoolExecutor(2, "load")  # they let go of the interpreter, so the weights are read beside them
    digest = helpers.submit(checkpoint.digest)
    loading_grammars = helpers.submit(_load_grammars, checkpoint.tokenizer)
    helpers.shutdown(wait=False)
    free_at_start = device.free_memory()
    dtype_name, dtype = resolve_dtype(config, checkpoint.config.dtype or checkpoint.weights.default_dtype())
    is_quantized = checkpoint.weights.is_quantized()
    quantization = resolve_quantization(config, dtype_name, backend, is_quantized=is_quantized)
    precision = dtype_name if quantization == "none" else f"{dtype_name} with linear layers in {quantization}"
    check_weights_fit(
        checkpoint.source.name,
        num_elements=checkpoint.weights.num_elements(),
        num_bytes=weight_bytes(checkpoint.config, checkpoint.weights.num_elements(), dtype.itemsize, quantization),
        precision=precision,
        free=free_at_start,
    )
    model = checkpoint.config
    kv_dtype_name, kv_dtype = resolve_kv_dtype(config, dtype_name, backend)
    layout = backend.kv_layout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=kv_dtype,
    )
    backend = with_attention(config.attention_backend, backend, model, layout, dtype)
    decoder = Decoder(
        checkpoint.config,
        checkpoint.weights,
        backend,
        dtype,
        num_sampled=min(checkpoint.config.vocab_size, checkpoint.tokenizer.size),
        quantization=quantization,
        on_progress=thread.advance,
    )
    _log.info("loaded %d parameters in %.1f s", decoder.num_parameters, time.monotonic() - started)
    _log.info("computing in %s (--quantization %s)", precision, config.quantization)
    if backend.name == "reference" and not device.is_asynchronous:
        torch.set_num_threads(config.num_threads or usable_cores())  # the native kernels bring their own threads
    keep_freed_memory()  # not before the weights are loaded, which takes and frees more than is worth keeping
    reserved = memory_of_steps(config, decoder, backend, device, layout)
    thread.advance()
    size = size_pool(
        config,
        layout,
        device,
        free_at_start=free_at_start,
        free_now=device.free_memory() - reserved,
        free_host=free_host_memory(),
    )
    pool = KVPool(layout, size, backend, NUM_SCRATCH_BLOCKS if runs_ahead(backend, device) else 0)
    thread.advance()
    ahead = prepare(config, decoder, pool, backend, device, thread.advance)
    grammars = _grammars_or_none(loading_grammars)
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
            dtype=kv_dtype_name,
            layout=layout_name(layout),
        ),
        max_plans_in_flight=config.max_plans_in_flight,
        max_batched_token_count=config.max_num_batched_tokens,
        lease_ms=config.lease_ms,
        capabilities=[
            pb.CAPABILITY_BEAMS,
            pb.CAPABILITY_LOGIT_PROCESSORS,
            *([pb.CAPABILITY_GRAMMARS] if grammars is not None else []),
            pb.CAPABILITY_PROMPT_LOGPROBS,
            *([pb.CAPABILITY_SWAP] if size.num_host_blocks else []),
        ],
        prefill_tokens_per_s=measure_prefill(decoder, pool, device, config.max_num_batched_tokens),
        swap_bytes_per_s=measure_swap(pool, device),
        backend=describe_kernels(backend, quantization),
        version=__version__,
    )
    executor = Executor(
        decoder,
        pool,
        backend,
        max_batched_tokens=config.max_num_batched_tokens,
        device=device,
        ahead=ahead,
        grammars=grammars,
        on_progress=thread.advance,
    )
    thread.when_idle = pool.populate_ahead
    return Worker(executor, checkpoint.tokenizer, description)


def describe_kernels(backend: Backend, quantization: Quantization) -> str:
    """The backend, and what its linear layers compute in where that is not the model's dtype."""
    return backend.describe() if quantization == "none" else f"{backend.describe()}, {quantization}"


def _load_grammars(tokenizer: TokenizerBundle) -> GrammarEngine:
    return GrammarEngine(tokenizer, num_threads=max(1, min(_MOST_GRAMMAR_THREADS, usable_cores() // 2)))


def _grammars_or_none(loading: Future[GrammarEngine]) -> GrammarEngine | None:
    """None, and a warning that says why, where the model's tokenizer does not do."""
    try:
        return loading.result()
    except GrammarUnavailableError as error:
        _log.warning("grammars are not offered: %s", error)
        return None


def _load_backend(config: WorkerConfig, device: torch.device) -> Backend:
    try:
        return load_backend(config.kernel_backend, device=device, num_threads=config.num_threads or None)
    except BackendUnavailableError as error:
        raise ConfigError(f"kernel_backend {config.kernel_backend!r}: {error}") from None
