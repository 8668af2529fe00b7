"""The paged KV memory: one tensor on the device and one on the host, sized from memory that is free.

A block's bytes follow `KVLayout`. Who owns which block is the router's business; nothing here keeps count.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.config import GIB, WorkerConfig
from octavo.errors import ConfigError
from octavo_kernels.backend import Backend, KVLayout

MIN_BLOCKS = 4
LAYOUT_NAME = "block-major,k=d*t,v=t*d"


@dataclass(frozen=True)
class PoolSize:
    """Blocks on each tier."""

    num_device_blocks: int
    num_host_blocks: int


class KVPool:
    """The tensors of both tiers and the moves between them.

    device: (num_device_blocks, layers, 2, KV heads, block_size * head_dim); host: the same with num_host_blocks, on
    the CPU. layers: K and V of each layer, views into `device`.
    """

    def __init__(self, layout: KVLayout, size: PoolSize, backend: Backend) -> None:
        self.layout, self.size = layout, size
        self._backend = backend
        self.device = _zeros(layout, size.num_device_blocks, backend.device, pinned=False)
        self.layers = layout.layers(self.device)
        self.host = _zeros(layout, size.num_host_blocks, torch.device("cpu"), pinned=backend.device.type == "cuda")

    def swap_out(self, device_blocks: Tensor, host_blocks: Tensor) -> int:
        """Copies device blocks to the host; columns (n,) int64 on the CPU. Returns the bytes moved."""
        self._backend.move_blocks(self.device, device_blocks, self.host, host_blocks)
        return len(device_blocks) * self.layout.bytes_per_block

    def swap_in(self, host_blocks: Tensor, device_blocks: Tensor) -> int:
        """Copies host blocks to the device; columns (n,) int64 on the CPU. Returns the bytes moved."""
        self._backend.move_blocks(self.host, host_blocks, self.device, device_blocks)
        return len(device_blocks) * self.layout.bytes_per_block

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies device blocks to device blocks; columns (n,) int64 on the CPU."""
        self._backend.copy_blocks(self.device, sources, targets)


def size_pool(
    config: WorkerConfig, layout: KVLayout, device: torch.device, *, free_at_start: int, free_now: int, free_host: int
) -> PoolSize:
    """How many blocks each tier gets.

    free_at_start, free_now: bytes free on the device before the weights were loaded and now; free_host: bytes free on
    the host now. Weights and KV together take at most `gpu_memory_utilization` of what was free. On a CPU device both
    tiers share the host's memory: where their wishes exceed it, each gets the same share of its wish.
    Raises ConfigError, with the numbers, when a size that was asked for does not fit or almost nothing would.
    """
    block = layout.bytes_per_block
    budget = max(free_now - math.ceil((1 - config.gpu_memory_utilization) * free_at_start), 0)
    host_wish = int(config.swap_space * GIB)
    on_cpu = device.type == "cpu"
    if config.num_device_blocks:
        wanted = config.num_device_blocks * block + (host_wish if on_cpu else 0)
        if wanted > budget:
            raise ConfigError(
                f"num_device_blocks is {config.num_device_blocks}: with swap_space that is {_gib(wanted)}, "
                f"but only {_gib(budget)} of {_gib(free_now)} free memory may be taken "
                f"(gpu_memory_utilization {config.gpu_memory_utilization:g})"
            )
        return PoolSize(config.num_device_blocks, _host_blocks(host_wish, free_host, block))
    device_wish = min(budget, int(config.kv_cache_memory * GIB)) if on_cpu and config.kv_cache_memory else budget
    if on_cpu and device_wish + host_wish > budget:
        share = budget / (device_wish + host_wish)
        device_wish, host_wish = int(device_wish * share), int(host_wish * share)
    num_blocks = device_wish // block
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"too little memory for KV blocks: {_gib(device_wish)} may be taken, and {MIN_BLOCKS} blocks of "
            f"{layout.block_size} tokens need {_gib(MIN_BLOCKS * block)}; free memory is {_gib(free_now)}, "
            f"gpu_memory_utilization {config.gpu_memory_utilization:g}, kv_cache_memory {config.kv_cache_memory:g} GiB"
        )
    return PoolSize(num_blocks, _host_blocks(host_wish, free_host, block))


def _host_blocks(wish: int, free_host: int, block: int) -> int:
    if wish > free_host:
        raise ConfigError(f"swap_space is {_gib(wish)}, but only {_gib(free_host)} are free on the host")
    return wish // block


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 100 else f"{num_bytes / (1 << 20):.2f} MiB"


def _zeros(layout: KVLayout, num_blocks: int, device: torch.device, *, pinned: bool) -> Tensor:
    """A pool of zeros.

    On the CPU it is a private mapping: pages cost nothing until a block is first written, and huge ones are asked for,
    since attention reads long stretches.
    """
    shape = layout.pool_shape(num_blocks)
    if device.type != "cpu" or pinned or not num_blocks:
        return torch.zeros(shape, dtype=layout.dtype, device=device, pin_memory=pinned and num_blocks > 0)
    memory = mmap.mmap(-1, num_blocks * layout.bytes_per_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=layout.dtype).view(shape)
