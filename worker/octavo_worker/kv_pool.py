"""The paged KV memory: one tensor on the device and one on the host, sized from memory that is free.

A block's bytes follow `KVLayout`. Who owns which block is the router's business; nothing here keeps count.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.config import GIB, WorkerConfig
from octavo.errors import ConfigError
from octavo_kernels.backend import Backend, KVLayout
from octavo_worker.block_ops import BlockMover
from octavo_worker.devices import CpuDevice, Device, open_device

_log = logging.getLogger(__name__)
MIN_BLOCKS = 4
# Routers hand out blocks that were never used first, in their order. So much is some seconds of the fastest steps.
_AHEAD_BYTES = GIB
_POPULATED_AT_ONCE = 2 << 20  # a huge page: a few milliseconds where the kernel has to find it first


@dataclass(frozen=True)
class PoolSize:
    """Blocks on each tier."""

    num_device_blocks: int
    num_host_blocks: int


class KVPool:
    """The tensors of both tiers and the moves between them.

    device: (num_device_blocks + num_scratch_blocks, layers, 2, KV heads, tile_size) of the layout's pool_dtype; host:
    the same with num_host_blocks, on the CPU, and locked in memory where the device copies by itself. Scratch blocks
    lie behind the others, and no sequence gets them. layers: K and V of each layer, views into `device`. Moves between
    tiers run beside the computing where the device has a way to (`block_ops`): `before_use` is called ahead of it.

    Where memory is taken only when it is first written, which costs as much as half a step, idle moments put some
    behind the blocks that come next (`populate_ahead`); `will_use` tells it of those that sequences get.
    """

    def __init__(self, layout: KVLayout, size: PoolSize, backend: Backend, num_scratch_blocks: int = 0) -> None:
        self.layout, self.size = layout, size
        self._mover = BlockMover(backend)
        device, host = open_device(backend.device), CpuDevice()
        self.device = device.reserve(layout.pool_shape(size.num_device_blocks + num_scratch_blocks), layout.pool_dtype)
        self.layers = layout.layers(self.device)
        self.host = host.reserve(layout.pool_shape(size.num_host_blocks), layout.pool_dtype)
        if size.num_host_blocks:
            device.lock(self.host)
        self._device_ahead, self._host_ahead = _Ahead(self.device, device), _Ahead(self.host, host)

    def swap_out(self, device_blocks: Tensor, host_blocks: Tensor) -> int:
        """Copies device blocks to the host; columns (n,) int64 on the CPU. Returns the bytes moved."""
        self._host_ahead.reach(host_blocks.numpy())
        self._mover.move_out(self.device, device_blocks, self.host, host_blocks)
        return len(device_blocks) * self.layout.bytes_per_block

    def swap_in(self, host_blocks: Tensor, device_blocks: Tensor) -> int:
        """Copies host blocks to the device; columns (n,) int64 on the CPU. Returns the bytes moved."""
        self._mover.move_in(self.host, host_blocks, self.device, device_blocks)
        return len(device_blocks) * self.layout.bytes_per_block

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies device blocks to device blocks; columns (n,) int64 on the CPU."""
        self._mover.copy(self.device, sources, targets)

    def will_use(self, device_blocks: NDArray[np.integer]) -> None:
        """These device blocks are a sequence's from here on."""
        self._device_ahead.reach(device_blocks)

    def populate_ahead(self) -> bool:
        """Puts memory behind the next few blocks that were never used, in some milliseconds at most: the host's when
        the device's end is near. Returns whether there may be more to do."""
        return self._device_ahead.advance() or (self._device_ahead.is_over and self._host_ahead.advance())

    @property
    def is_moving(self) -> bool:
        """Whether a move between tiers may still be under way, so that `before_use` has something to wait for."""
        return self._mover.is_moving

    def before_use(self, device_blocks: NDArray[np.integer]) -> None:
        """Holds what is computed from here on until the moves under way of these device blocks are over."""
        self._mover.before_use(device_blocks)


def layout_name(layout: KVLayout) -> str:
    """A layout's name; equal names have equal bytes."""
    k, v = ("d*t" if transposed else "t*d" for transposed in (layout.k_transposed, layout.v_transposed))
    return f"block-major,k={k},v={v}" + (",scales=t" if layout.is_quantized else "")


def size_pool(
    config: WorkerConfig, layout: KVLayout, device: Device, *, free_at_start: int, free_now: int, free_host: int
) -> PoolSize:
    """How many blocks each tier gets.

    free_at_start, free_now: bytes free on the device before the weights were loaded and now; free_host: bytes free on
    the host now. Weights and KV together take at most `gpu_memory_utilization` of what was free. On a device that
    shares the host's memory, wishes of both tiers may exceed it: each then gets the same share of its wish, but the
    device as many blocks as `num_device_blocks` asks for. A host tier that gets less than `swap_space` is told in the
    log. Raises ConfigError, with the numbers, when the device's blocks do not fit or almost none would.
    """
    block = layout.bytes_per_block
    budget = max(free_now - math.ceil((1 - config.gpu_memory_utilization) * free_at_start), 0)
    host_wish, is_shared = int(config.swap_space * GIB), device.shares_host_memory
    if config.num_device_blocks:
        num_blocks = config.num_device_blocks
        if num_blocks * block > budget:
            raise ConfigError(
                f"num_device_blocks is {num_blocks}: that is {_gib(num_blocks * block)}, "
                f"but only {_gib(budget)} of {_gib(free_now)} free memory may be taken "
                f"(gpu_memory_utilization {config.gpu_memory_utilization:g})"
            )
    else:
        wish = min(budget, int(config.kv_cache_memory * GIB)) if is_shared and config.kv_cache_memory else budget
        if is_shared and wish + host_wish > budget:
            wish = max(wish * budget // (wish + host_wish), min(wish, MIN_BLOCKS * block))
        num_blocks = wish // block
        if num_blocks < MIN_BLOCKS:
            raise ConfigError(
                f"too little memory for KV blocks: {_gib(wish)} may be taken, and {MIN_BLOCKS} blocks of "
                f"{layout.block_size} tokens need {_gib(MIN_BLOCKS * block)}; free memory is {_gib(free_now)}, "
                f"gpu_memory_utilization {config.gpu_memory_utilization:g}, "
                f"kv_cache_memory {config.kv_cache_memory:g} GiB"
            )
    host_room = budget - num_blocks * block if is_shared else int(config.gpu_memory_utilization * free_host)
    num_host_blocks = min(host_wish, host_room) // block
    if host_room < host_wish:
        _log.warning(
            "the host tier gets %s of the %s that swap_space allows: no more of the host's memory may be taken",
            _gib(num_host_blocks * block),
            _gib(host_wish),
        )
    return PoolSize(num_blocks, num_host_blocks)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 100 else f"{num_bytes / (1 << 20):.2f} MiB"


class _Ahead:
    """Puts memory behind the blocks of a tier that are used next, `_AHEAD_BYTES` beyond the highest one so far."""

    def __init__(self, tier: Tensor, device: Device) -> None:
        self._tier, self._device = tier, device
        self._used = self._populated = 0
        per_block = max(1, tier[:1].nbytes)
        self._ahead, self._at_once = _AHEAD_BYTES // per_block, max(1, _POPULATED_AT_ONCE // per_block)

    def reach(self, blocks: NDArray[np.integer]) -> None:
        """These blocks are used from here on."""
        if len(blocks):
            self._used = max(self._used, int(blocks.max()) + 1)

    @property
    def _next(self) -> int:
        return max(self._populated, self._used)

    @property
    def is_over(self) -> bool:
        """Whether all of the tier has its memory."""
        return self._next == len(self._tier)

    def advance(self) -> bool:
        """Takes a step, and returns whether it was one."""
        start = self._next
        self._populated = min(start + self._at_once, self._used + self._ahead, len(self._tier))
        return start < self._populated and self._device.populate(self._tier[start : self._populated])
