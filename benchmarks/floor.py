"""The time below which no step can go on a machine: what it must read, and what it must multiply.

The machine's rates are measured, not looked up: memory by summing an array too large for any cache, arithmetic by a
product of square matrices, both by torch on all cores that the worker takes. Compare them with each other, not with a
data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from octavo_worker.loaders.config import DTYPE_BYTES, ModelConfig

_ARRAY_BYTES = 512 << 20
_MATRIX_SIZE = 2048
_TRIES = 20


@dataclass(frozen=True)
class Rates:
    """Bytes read a second, and operations a second on numbers of the type that is multiplied."""

    bytes_per_s: float
    flops_per_s: float

    def shown(self) -> str:
        """For people."""
        return f"{self.bytes_per_s / 1e9:.1f} GB/s, {self.flops_per_s / 1e9:.0f} Gop/s"

    def as_json(self) -> dict[str, float]:
        """For the results."""
        return asdict(self)


def measure_rates(dtype: str, num_threads: int, *, is_int8: bool = False) -> Rates:
    """The machine's rates, the best of a few tries. Of 8-bit numbers an instruction multiplies twice as many as of
    16-bit ones, so their rate is twice bfloat16's.
    """
    dtype, factor = ("bfloat16", 2) if is_int8 else (dtype, 1)
    torch.set_num_threads(num_threads)
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=getattr(torch, dtype))
    return Rates(
        bytes_per_s=MemoryProbe(num_threads).bytes_per_s(),
        flops_per_s=factor * 2 * _MATRIX_SIZE**3 / _best_s(lambda: matrix @ matrix, _TRIES),
    )


class MemoryProbe:
    """Reads an array that no cache holds, which it keeps."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._array = torch.zeros(_ARRAY_BYTES // 8, dtype=torch.int64)

    def bytes_per_s(self, num_tries: int = _TRIES) -> float:
        """Bytes read a second, the best of a few tries."""
        return _ARRAY_BYTES / _best_s(self._array.sum, num_tries)


def _best_s(work: Callable[[], object], num_tries: int) -> float:
    times = []
    for _ in range(num_tries):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True)
class Floor:
    """The least time of a decode step of a model on a machine. weight_bytes: of one weight of a linear layer."""

    config: ModelConfig
    dtype: str
    weight_bytes: float
    rates: Rates

    @property
    def num_weights(self) -> int:
        """Weights that a step multiplies with: all but the embeddings, which a token only looks up, and norms."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size

    def step_s(self, num_sequences: int, context: int) -> float:
        """Seconds for one token of each of so many sequences with so many tokens before it."""
        c = self.config
        kv_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * DTYPE_BYTES[self.dtype] * context
        num_bytes = self.num_weights * self.weight_bytes + num_sequences * kv_bytes
        attention_flops = 4 * c.num_layers * c.num_heads * c.head_dim * context
        flops = num_sequences * (2 * self.num_weights + attention_flops)
        return max(num_bytes / self.rates.bytes_per_s, flops / self.rates.flops_per_s)
