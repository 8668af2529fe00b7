"""Columns of a step packed into one buffer, and a ring of such buffers in pinned memory.

A copy out of pinned memory is done by the device itself while the host goes on, so a buffer is filled again only once
the copy out of it is over. Each column begins at a multiple of 16 bytes, which kernels load fastest from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
_MIN_BYTES = 1 << 16
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


class CopyEvent(Protocol):
    """A mark in a device's queue."""

    def record(self) -> None:
        """Sets the mark behind all that is in the queue."""

    def query(self) -> bool:
        """Whether the queue is past the mark."""

    def synchronize(self) -> None:
        """Waits until it is."""


@dataclass
class _Slot:
    """A buffer, and the mark behind the last copy out of it; None: there was none."""

    buffer: Tensor
    event: CopyEvent | None = None


class StagingRing:
    """Packs columns into buffers in turn.

    make_buffer: gives a host buffer of so many bytes, (n,) uint8; make_event: a mark; num_slots: copies that may be
    under way before one is waited for.
    """

    def __init__(
        self, make_buffer: Callable[[int], Tensor], make_event: Callable[[], CopyEvent], num_slots: int = 8
    ) -> None:
        self._make_buffer, self._make_event = make_buffer, make_event
        self._slots = [_Slot(make_buffer(_MIN_BYTES)) for _ in range(num_slots)]
        self._next = 0

    def upload(self, columns: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
        """The columns on the device, by one copy."""
        starts, num_bytes = _places(columns)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.event is not None:
            slot.event.synchronize()
        if len(slot.buffer) < num_bytes:
            slot.buffer = self._make_buffer(1 << (num_bytes - 1).bit_length())
        staged = slot.buffer.numpy()
        for column, start in zip(columns, starts, strict=True):
            staged[start : start + column.nbytes] = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
        packed = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)
        packed[:num_bytes].copy_(slot.buffer[:num_bytes], non_blocking=True)
        slot.event = slot.event or self._make_event()
        slot.event.record()
        return [
            packed[start : start + column.nbytes].view(_DTYPES[column.dtype]).view(column.shape)
            for column, start in zip(columns, starts, strict=True)
        ]


def _places(columns: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Where each column begins, and the bytes of all."""
    starts, end = [], 0
    for column in columns:
        starts.append(end)
        end += -(-column.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, end
