"""A model of random weights, made on the device, with a KV pool and an executor around it, as a worker has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from gpu.bench import Bench
from octavo_worker.decode_graphs import DecodeGraphs
from octavo_worker.executor import Executor
from octavo_worker.kv_pool import KVPool, PoolSize
from octavo_worker.loaders.config import ModelConfig
from octavo_worker.models.decoder import Decoder
from octavo_worker.preparation import NUM_SCRATCH_BLOCKS, record, warm_up
from octavo_worker.run_ahead import RunAhead

_HOST_BYTES = 1 << 30
_SHARE = 0.85
_SCALE = 0.02


class Noting(Protocol):
    """Notes what fails within a `with` block, and goes on behind it."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool: ...


class RandomWeights:
    """Tensors of any name and shape. Norms are ones, so that activations stay of one size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Weights.get`; the tensor is on the device."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, device=self._device).normal_(0, _SCALE, generator=self._generator)

    def get_int4(self, name: str, shape: tuple[int, int]) -> None:
        """See `Weights.get_int4`: there are none."""

    def default_dtype(self) -> str:
        """See `Weights.default_dtype`."""
        return "bfloat16"

    def num_elements(self) -> int:
        """See `Weights.num_elements`; nobody asks."""
        return 0

    def is_quantized(self) -> bool:
        """See `Weights.is_quantized`."""
        return False


@dataclass(frozen=True)
class Served:
    """A model that is ready to compute. max_batched_tokens: of one step; has_graphs: whether decode steps are
    recorded."""

    decoder: Decoder
    pool: KVPool
    ahead: RunAhead
    executor: Executor
    max_batched_tokens: int
    has_graphs: bool


def load(bench: Bench) -> Decoder:
    """The model."""
    return Decoder(
        bench.sizes.model,
        RandomWeights(bench.device.torch_device),
        bench.backend,
        bench.sizes.dtype,
        num_sampled=bench.sizes.model.vocab_size,
    )


def serve(
    bench: Bench,
    decoder: Decoder,
    make_ahead: Callable[..., RunAhead],
    noting: Callable[[str], Noting],
) -> Served:
    """Pool, warm kernels, graphs and executor. The pool holds the largest decode step that fits.

    make_ahead: what launches steps, with RunAhead's arguments; noting: notes what fails within it, so that steps are
    measured all the same: without a host tier, with kernels that are compiled by the first steps, or op by op.
    """
    sizes, most_tokens = bench.sizes, max(bench.sizes.prefill, max(bench.sizes.batches))
    pool = _pool(bench, decoder.config, noting)
    with noting("kernels of all kinds of steps"):
        warm_up(decoder, pool, bench.backend, bench.device, most_tokens)
    graphs: DecodeGraphs | None = None
    with noting("graphs of decode steps"):
        graphs = record(decoder, pool, bench.backend, bench.device, max(sizes.batches))
    ahead = make_ahead(decoder, pool, bench.backend, bench.device, graphs)
    executor = Executor(decoder, pool, bench.backend, max_batched_tokens=most_tokens, device=bench.device, ahead=ahead)
    return Served(decoder, pool, ahead, executor, most_tokens, graphs is not None)


def _pool(bench: Bench, model: ModelConfig, noting: Callable[[str], Noting]) -> KVPool:
    """One with a host tier, if the host's memory can be locked."""
    sizes = bench.sizes
    layout = bench.backend.kv_layout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=sizes.block_size,
        dtype=sizes.dtype,
    )
    wanted = max(
        -(-(max(sizes.contexts) + sizes.steps + 2) // sizes.block_size) * max(sizes.batches),
        -(-(sizes.prompt + sizes.output) // sizes.block_size) * sizes.requests,
    )
    num_blocks = min(wanted, int(_SHARE * bench.device.free_memory()) // layout.bytes_per_block)
    num_host = max(1, min(_HOST_BYTES // layout.bytes_per_block, num_blocks // 2))
    with noting("host tier"):
        return KVPool(layout, PoolSize(num_blocks, num_host), bench.backend, NUM_SCRATCH_BLOCKS)
    bench.device.free_memory()
    return KVPool(layout, PoolSize(num_blocks, 0), bench.backend, NUM_SCRATCH_BLOCKS)
