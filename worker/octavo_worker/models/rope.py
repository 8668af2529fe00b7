"""Rotary positions: the cosines and sines that the decoder's `rotary` op takes.

Frequencies are computed in fp32 exactly as transformers computes them, so that logits agree. All scalings but
"dynamic" give one table for every position. "Dynamic" (NTK by length) depends on how long the text is, so its rows are
made for each pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo_worker.loaders.config import RopeConfig


class RotaryTable:
    """Gives the cosines and sines of a pass's tokens.

    For "dynamic" scaling a prompt's tokens are rotated with the base for the prompt's length, a later token with the
    base for the length up to itself: what transformers does when it computes a prompt in one pass and then goes on
    with its cache. It depends on the sequence alone, never on chunks or on its neighbours.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_len: int, device: torch.device) -> None:
        self._config, self._head_dim, self._device = config, head_dim, device
        self._table = self._rows(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(config, head_dim))

    def select(self, positions: Tensor, prompt_lens: Tensor | None) -> tuple[Tensor, Tensor]:
        """(rows into the table, table) for the `rotary` op.

        positions: (T,) int32; prompt_lens: (T,) int32, the length of the prompt of each token's sequence, which only
        "dynamic" needs. Returns (T,) int32 and (rows, head_dim) fp32.
        """
        if self._config.kind != "dynamic" or prompt_lens is None:
            return positions, self._table
        lens = torch.maximum(positions + 1, prompt_lens)
        if int(lens.max()) <= self._config.original_max_len:
            return positions, self._table
        distinct, which = torch.unique(lens, return_inverse=True)
        frequencies = torch.stack([inverse_frequencies(self._config, self._head_dim, n) for n in distinct.tolist()])
        rows = self._rows(positions.cpu().float(), frequencies[which.cpu()])
        return torch.arange(len(positions), dtype=torch.int32, device=self._device), rows

    @property
    def depends_on_length(self) -> bool:
        """Whether `select` needs prompt_lens."""
        return self._config.kind == "dynamic"

    def _rows(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """(n, head_dim): cosines, then sines. frequencies: (head_dim / 2,) for all, or (n, head_dim / 2)."""
        angles = positions.unsqueeze(1) * frequencies
        return (torch.cat([angles.cos(), angles.sin()], dim=1) * self._config.attention_factor).to(self._device)


def inverse_frequencies(config: RopeConfig, head_dim: int, length: int = 0) -> Tensor:
    """(head_dim / 2,) fp32: radians a position for each pair of dimensions. `length` is the text's, for "dynamic"."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    if config.kind == "dynamic":
        stretch = config.factor * max(length, config.original_max_len) / config.original_max_len - (config.factor - 1)
        base = config.theta * stretch ** (head_dim / (head_dim - 2))
        frequencies: Tensor = 1.0 / base**exponents
        return frequencies
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "factors":
        return frequencies / torch.tensor(config.frequency_factors, dtype=torch.float32)
    if config.kind == "yarn":
        return _yarn(config, head_dim, exponents)
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    return frequencies


def _yarn(config: RopeConfig, head_dim: int, exponents: Tensor) -> Tensor:
    """Interpolates slow dimensions and keeps fast ones (Peng et al., YaRN, 2023, section 3.2)."""

    def dimension(rotations: float) -> float:
        turns = config.original_max_len / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    steps = config.theta**exponents
    return 1.0 / (config.factor * steps) * (1 - keep) + 1.0 / steps * keep


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Divides slow frequencies by the factor and blends in between (Llama 3.1's reference code)."""
    wavelengths = 2 * math.pi / frequencies
    longest = config.original_max_len / config.low_freq_factor
    shortest = config.original_max_len / config.high_freq_factor
    slow = torch.where(wavelengths > longest, frequencies / config.factor, frequencies)
    blend = (config.original_max_len / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - blend) * slow / config.factor + blend * slow
    between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(between, blended, slow)
