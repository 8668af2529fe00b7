"""Moves of KV blocks between the tiers, and copies within the device.

Moves between tiers run on two streams of their own, one a direction, beside the computing and beside each other. A move
begins behind everything that was ordered on the device before it, and behind the moves of the other direction that are
under way with one of its blocks, on either tier; whoever uses a block afterwards waits for the moves of that block, and
for no others (`before_use`).

A CPU has nothing that copies beside its cores: there a move is a plain memcpy of the backend and over when the call
returns, and torch's streams of the CPU, which do nothing, stand for the others. Which blocks are moved when is the
router's to say.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.backend import Backend
from octavo_worker.sequences import IntArray


@dataclass(frozen=True, eq=False)
class _Move:
    """One that is under way. stream: its direction's; event: behind it."""

    stream: Any
    event: Any
    device_blocks: IntArray
    host_blocks: IntArray


class BlockMover:
    """Moves blocks of one backend's device. Columns of block ids are (n,) int64 on the CPU."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._runtime: Any = torch.get_device_module(backend.device)
        self._out, self._in = self._runtime.Stream(), self._runtime.Stream()
        self._under_way: deque[_Move] = deque()  # oldest first

    def move_out(self, device: Tensor, device_blocks: Tensor, host: Tensor, host_blocks: Tensor) -> None:
        """host[host_blocks[i]] = device[device_blocks[i]]."""
        if not len(device_blocks):
            return
        with self._moving(self._out, device_blocks, host_blocks):
            self._backend.move_blocks(device, device_blocks, host, host_blocks)

    def move_in(self, host: Tensor, host_blocks: Tensor, device: Tensor, device_blocks: Tensor) -> None:
        """device[device_blocks[i]] = host[host_blocks[i]]."""
        if not len(device_blocks):
            return
        with self._moving(self._in, device_blocks, host_blocks):
            self._backend.move_blocks(host, host_blocks, device, device_blocks)

    def copy(self, device: Tensor, sources: Tensor, targets: Tensor) -> None:
        """device[targets[i]] = device[sources[i]], in the order of the computing."""
        self.before_use(np.concatenate([sources.numpy(), targets.numpy()]))
        self._backend.copy_blocks(device, sources, targets)

    @property
    def is_moving(self) -> bool:
        """Whether a move between tiers may still be under way."""
        while self._under_way and self._under_way[0].event.query():
            self._under_way.popleft()
        return bool(self._under_way)

    def before_use(self, device_blocks: NDArray[np.integer]) -> None:
        """Holds what is computed from here on until the moves under way of these device blocks are over."""
        if not self.is_moving:
            return
        current = self._runtime.current_stream()
        for stream in (self._out, self._in):
            mine = [move for move in self._under_way if move.stream is stream]
            for last in range(len(mine) - 1, -1, -1):
                if np.isin(device_blocks, mine[last].device_blocks).any():
                    current.wait_event(mine[last].event)
                    waited = mine[: last + 1]  # the older ones of its stream are over before it
                    self._under_way = deque(move for move in self._under_way if move not in waited)
                    break

    @contextlib.contextmanager
    def _moving(self, stream: Any, device_blocks: Tensor, host_blocks: Tensor) -> Iterator[None]:
        """Runs a move on its direction's stream, in its order among the others."""
        on_device, on_host = device_blocks.numpy(), host_blocks.numpy()
        stream.wait_stream(self._runtime.current_stream())
        for move in reversed(self._under_way):
            if move.stream is not stream and (
                np.isin(on_device, move.device_blocks).any() or np.isin(on_host, move.host_blocks).any()
            ):
                stream.wait_event(move.event)  # the older ones of that direction are over before it
                break
        with self._runtime.stream(stream):
            yield
        event = self._runtime.Event()
        event.record(stream)
        self._under_way.append(_Move(stream, event, on_device, on_host))
