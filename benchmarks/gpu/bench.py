"""What every part of the benchmark works with: device, kernels, sizes, and a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels import Backend
from octavo_kernels.reference import ReferenceBackend
from octavo_worker.devices import Device
from octavo_worker.loaders.config import ModelConfig, RopeConfig

_REPEATS = 10


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    model: the shape of the model; dtype: what it computes in; checked: the dtypes whose kernels are held against the
    oracle, the one that matters most first; batches, contexts: of decode steps; prefill: tokens of a prompt, in one
    step; requests, prompt, output: of the load that is served; steps: decode steps that are timed; copy_bytes: of a
    large copy; matrix: rows and columns of a large product; rows: of activations that are larger than a cache.
    """

    model: ModelConfig
    dtype: torch.dtype
    checked: tuple[torch.dtype, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill: int
    requests: int
    prompt: int
    output: int
    steps: int
    copy_bytes: int
    matrix: int
    rows: int
    block_size: int = 16


@dataclass(frozen=True)
class Bench:
    """One run's device, kernels and sizes. reference: the oracle on the same device."""

    device: Device
    backend: Backend
    reference: ReferenceBackend
    sizes: Sizes

    def normal(self, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
        """Random values of the model's dtype on the device."""
        return (self.numbers(*shape, seed=seed) * scale).to(self.sizes.dtype)

    def numbers(self, *shape: int, seed: int = 0) -> Tensor:
        """Random fp32 values on the device."""
        return torch.randn(*shape, generator=self.generator(seed), device=self.device.torch_device, dtype=torch.float32)

    def generator(self, seed: int) -> torch.Generator:
        """The device's, but not its default one: that one is of no more use where a recording of a graph has failed."""
        return torch.Generator(self.device.torch_device).manual_seed(seed)

    def seconds(self, work: Callable[[], Tensor], *, rounds: int = 5) -> float:
        """Time of one call of `work` on the device: the median of rounds of several, recorded so that the host's part
        does not count."""
        if not self.device.is_asynchronous:
            return statistics.median(self._wall(work) for _ in range(rounds))

        def several() -> Tensor:
            for _ in range(_REPEATS - 1):
                work()
            return work()

        graph = self.device.capture(several)
        graph.replay()
        return statistics.median(self._wall(graph.replay) for _ in range(rounds)) / _REPEATS

    def eager_seconds(self, work: Callable[[], object], *, rounds: int = 5) -> float:
        """Time of one call of `work` until the device is through with it, the host's part included: the median."""
        work()
        return statistics.median(self._wall(work) for _ in range(rounds))

    def _wall(self, work: Callable[[], object]) -> float:
        self.device.synchronize()
        started = time.perf_counter()
        work()
        self.device.synchronize()
        return time.perf_counter() - started


def llama_8b() -> ModelConfig:
    """The shape of Llama 3 8B."""
    return _shape(layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=128_256, max_len=8448)


def tiny() -> ModelConfig:
    """A model for trying the benchmark itself."""
    return _shape(layers=2, hidden=64, inner=96, heads=4, kv_heads=2, vocab=320, max_len=256)


def _shape(*, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, max_len: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_model_len=max_len,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
        sliding_windows=(None,) * layers,
    )


FULL = Sizes(
    model=llama_8b(),
    dtype=torch.bfloat16,
    checked=(torch.bfloat16, torch.float16, torch.float32),
    batches=(1, 16, 64, 256),
    contexts=(1000, 8000),
    prefill=8000,
    requests=64,
    prompt=512,
    output=128,
    steps=24,
    copy_bytes=2 << 30,
    matrix=8192,
    rows=8192,
)
TINY = Sizes(
    model=tiny(),
    dtype=torch.float32,
    checked=(torch.bfloat16, torch.float32),
    batches=(1, 3),
    contexts=(20, 40),
    prefill=32,
    requests=4,
    prompt=12,
    output=5,
    steps=4,
    copy_bytes=1 << 20,
    matrix=64,
    rows=16,
)
