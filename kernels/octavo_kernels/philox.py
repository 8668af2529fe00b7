"""Philox4x32-10, the counter-based generator behind sampling, in plain torch.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The same key and counter give the
same words on every device and in every batch, so sampling needs no state.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words. Every word is an int64 tensor holding 32 unsigned bits; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """The noise of every id, as `Backend.gumbel_argmax` defines it.

    seeds, positions: (S,) int64. Returns (S, vocab) fp32.
    """
    counters = torch.arange((vocab + 3) // 4, dtype=torch.int64, device=seeds.device)[None]
    seeds, positions = seeds[:, None], positions[:, None]
    zero = torch.zeros_like(counters)
    words = philox4x32(
        (counters, zero, positions & _MASK, (positions >> 32) & _MASK), (seeds & _MASK, (seeds >> 32) & _MASK)
    )
    word = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocab]  # (S, vocab)
    u = (word >> 8).to(torch.float64) * 2.0**-24 + 2.0**-25
    return (-torch.log(-torch.log(u))).to(torch.float32)


def _multiply(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product; int64 wraps, and the bits are those of uint64."""
    product = a * factor
    return (product >> 32) & _MASK, product & _MASK
