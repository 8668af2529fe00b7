"""The time below which no step can go on a machine: what it must read, and what it must multiply.

What is counted, and what not, is in docs/roofline.md. A CPU's rates are measured here, not looked up: memory by summing
an array too large for any cache, arithmetic by a product of square matrices, both by torch on all cores that the worker
takes. Compare them with each other, not with a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from octavo_worker.loaders.config import DTYPE_BYTES, QUANTIZED_KV_DTYPES, ModelConfig

_ARRAY_BYTES = 512 << 20
_MATRIX_SIZE = 2048
_TRIES = 20

KV_DTYPES = (*DTYPE_BYTES, *QUANTIZED_KV_DTYPES)
"""What K and V can be stored in."""


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
class Work:
    """What a step must do at least.

    weight_bytes, kv_bytes: to be moved; linear_flops, attention_flops: to be computed, a multiplication and an addition
    being two.
    """

    weight_bytes: float
    kv_bytes: float
    linear_flops: float
    attention_flops: float

    def memory_s(self, rates: Rates) -> float:
        """Seconds of moving alone."""
        return (self.weight_bytes + self.kv_bytes) / rates.bytes_per_s

    def compute_s(self, rates: Rates) -> float:
        """Seconds of computing alone."""
        return (self.linear_flops + self.attention_flops) / rates.flops_per_s

    def floor_s(self, rates: Rates) -> float:
        """Seconds of the longer of both: not even a step that overlaps them all goes below."""
        return max(self.memory_s(rates), self.compute_s(rates))


@dataclass(frozen=True)
class Floor:
    """The least time of a model's steps on a machine.

    weight_bytes: of one weight of a linear layer, scales included; kv_dtype: of stored K and V, "" for dtype.
    """

    config: ModelConfig
    dtype: str
    weight_bytes: float
    rates: Rates
    kv_dtype: str = ""

    @property
    def num_body_weights(self) -> int:
        """Weights that every token of a step is multiplied with: all but embeddings, norms and the head."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)

    @property
    def num_weights(self) -> int:
        """Weights that a step multiplies with: all but the embeddings, which a token only looks up, and norms."""
        return self.num_body_weights + self.config.vocab_size * self.config.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, with a scale of 4 bytes a head where they have 8 bits."""
        return self.config.kv_bytes_per_token(self.kv_dtype or self.dtype)

    def decode(self, num_sequences: int, context: int) -> Work:
        """One token of each of so many sequences with so many tokens before it."""
        c = self.config
        seen = [min(context, window or context) for window in c.sliding_windows]
        return Work(
            weight_bytes=self.num_weights * self.weight_bytes,
            kv_bytes=num_sequences * self.kv_bytes_per_token / c.num_layers * sum(seen),
            linear_flops=2 * num_sequences * self.num_weights,
            attention_flops=4 * num_sequences * c.num_heads * c.head_dim * sum(seen),
        )

    def prefill(self, num_tokens: int) -> Work:
        """A prompt in one step, which gives the logits of its last token. K and V are written, and read once."""
        c = self.config
        pairs = sum(_num_pairs(num_tokens, window) for window in c.sliding_windows)
        return Work(
            weight_bytes=self.num_weights * self.weight_bytes,
            kv_bytes=2 * num_tokens * self.kv_bytes_per_token,
            linear_flops=2 * (num_tokens * self.num_body_weights + c.vocab_size * c.hidden_size),
            attention_flops=4 * c.num_heads * c.head_dim * pairs,
        )

    def step_s(self, num_sequences: int, context: int) -> float:
        """Seconds of `decode`."""
        return self.decode(num_sequences, context).floor_s(self.rates)

    def memory_bytes(self, num_sequences: int, context: int) -> float:
        """Bytes that weights, embeddings and the KV of so many sequences of so many tokens take."""
        c = self.config
        embeddings = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size * DTYPE_BYTES[self.dtype]
        weights = self.num_weights * self.weight_bytes + embeddings
        return weights + num_sequences * context * self.kv_bytes_per_token


def _num_pairs(num_tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it attends to, itself included, in a prompt."""
    full = min(num_tokens, window or num_tokens)
    return full * (full + 1) // 2 + (num_tokens - full) * full
