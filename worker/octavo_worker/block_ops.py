"""Moves of KV blocks between the tiers, and copies within the device.

Moves between tiers run on a stream of their own, beside the computing. A move begins behind everything that was ordered
on the device before it; whoever uses a block afterwards waits for the moves of that block, and for no others
(`before_use`). Moves keep their order among themselves, so the host's blocks need no waiting.

A CPU has nothing that copies beside its cores: there a move is a plain memcpy of the backend and over when the call
returns, and torch's streams of the CPU, which do nothing, stand for the others. Which blocks are moved when is the
router's to say.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.backend import Backend
from octavo_worker.sequences import IntArray


class BlockMover:
    """Moves blocks of one backend's device. Columns of block ids are (n,) int64 on the CPU."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._runtime: Any = torch.get_device_module(backend.device)
        self._stream = self._runtime.Stream()
        self._under_way: deque[tuple[Any, IntArray]] = deque()  # (event, device blocks), oldest first

    def move_out(self, device: Tensor, device_blocks: Tensor, host: Tensor, host_blocks: Tensor) -> None:
        """host[host_blocks[i]] = device[device_blocks[i]]."""
        self._move(device, device_blocks, host, host_blocks, device_blocks)

    def move_in(self, host: Tensor, host_blocks: Tensor, device: Tensor, device_blocks: Tensor) -> None:
        """device[device_blocks[i]] = host[host_blocks[i]]."""
        self._move(host, host_blocks, device, device_blocks, device_blocks)

    def copy(self, device: Tensor, sources: Tensor, targets: Tensor) -> None:
        """device[targets[i]] = device[sources[i]], in the order of the computing."""
        self.before_use(np.concatenate([sources.numpy(), targets.numpy()]))
        self._backend.copy_blocks(device, sources, targets)

    @property
    def is_moving(self) -> bool:
        """Whether a move between tiers may still be under way."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        return bool(self._under_way)

    def before_use(self, device_blocks: NDArray[np.integer]) -> None:
        """Holds what is computed from here on until the moves under way of these device blocks are over."""
        if not self.is_moving:
            return
        for index in range(len(self._under_way) - 1, -1, -1):
            event, moved = self._under_way[index]
            if np.isin(device_blocks, moved).any():
                self._runtime.current_stream().wait_event(event)
                for _ in range(index + 1):  # the older ones are over before it
                    self._under_way.popleft()
                return

    def _move(
        self, source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor, device_blocks: Tensor
    ) -> None:
        if not len(device_blocks):
            return
        self._stream.wait_stream(self._runtime.current_stream())
        with self._runtime.stream(self._stream):
            self._backend.move_blocks(source, source_blocks, target, target_blocks)
        event = self._runtime.Event()
        event.record(self._stream)
        self._under_way.append((event, device_blocks.numpy()))
