"""A model of random weights, made on the device, with a KV pool and an executor around it, as a worker has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.bench import Bench
from octavo_worker.executor import Executor
from octavo_worker.kv_pool import KVPool, PoolSize
from octavo_worker.models.decoder import Decoder
from octavo_worker.preparation import NUM_SCRATCH_BLOCKS, record, warm_up
from octavo_worker.run_ahead import RunAhead

_HOST_BYTES = 1 << 30
_SHARE = 0.85
_SCALE = 0.02


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
    """A model that is ready to compute. max_batched_tokens: of one step."""

    decoder: Decoder
    pool: KVPool
    ahead: RunAhead
    executor: Executor
    max_batched_tokens: int


def load(bench: Bench) -> Decoder:
    """The model."""
    return Decoder(
        bench.sizes.model,
        RandomWeights(bench.device.torch_device),
        bench.backend,
        bench.sizes.dtype,
        num_sampled=bench.sizes.model.vocab_size,
    )


def serve(bench: Bench, decoder: Decoder, make_ahead: Callable[..., RunAhead] = RunAhead) -> Served:
    """Pool, warm kernels, graphs and executor. The pool holds the largest decode step that fits.

    make_ahead: what launches steps, with RunAhead's arguments.
    """
    sizes, model = bench.sizes, bench.sizes.model
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
    pool = KVPool(layout, PoolSize(num_blocks, num_host), bench.backend, NUM_SCRATCH_BLOCKS)
    most_tokens = max(sizes.prefill, max(sizes.batches))
    warm_up(decoder, pool, bench.backend, bench.device, most_tokens)
    graphs = record(decoder, pool, bench.backend, bench.device, max(sizes.batches))
    ahead = make_ahead(decoder, pool, bench.backend, bench.device, graphs)
    executor = Executor(decoder, pool, bench.backend, max_batched_tokens=most_tokens, device=bench.device, ahead=ahead)
    return Served(decoder, pool, ahead, executor, most_tokens)
