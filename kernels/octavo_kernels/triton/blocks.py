"""Copying blocks within a pool (copy-on-write) and moving them between a pool on the device and one in host memory.

A block is one stretch of memory, so that a copy needs to know neither layers nor heads. Between device and pinned host
memory large blocks go by the copy engines, which need no multiprocessor, and small ones, for which a command each would
take longer than the transfer, by a kernel that reads and writes the host's memory through the bus: a few programs
saturate it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.reference import runs
from octavo_kernels.triton.checks import check_column, refuse
from octavo_kernels.triton.variant import Variant

# Programs of a move through the bus: enough for its bandwidth, few enough to leave the GPU to the others.
BUS_PROGRAMS = 32
# Programs of a copy in the device's memory.
COPY_PROGRAMS = 1024
# A block of so many bytes is expected to take the bus longer than its command takes the host.
LARGE_BLOCK = 1 << 20
_CHUNK = 2048


@triton.jit(do_not_specialize=["num_chunks"])
def _move_blocks_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    num_chunks,
    block_words,
    chunks_per_block,
    CHUNK: tl.constexpr,
):
    """Moves num_chunks chunks of CHUNK words of 8 bytes, in turns with the other programs."""
    for index in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        pair = index // chunks_per_block
        words = index % chunks_per_block * CHUNK + tl.arange(0, CHUNK)
        inside = words < block_words
        source = source_ptr + tl.load(source_ids_ptr + pair) * block_words
        target = target_ptr + tl.load(target_ids_ptr + pair) * block_words
        tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See `Backend.copy_blocks`; ids on the CPU or on the device. Mutates pool."""
    _check(pool, sources, pool, targets)
    _launch(pool, sources, pool, targets, pool.device, COPY_PROGRAMS)


def move_blocks(source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor) -> None:
    """See `Backend.move_blocks`. Mutates target, on the device's current stream.

    source, target: contiguous pools of one layout, on one device, or one of them in pinned host memory. Ids on the CPU,
    where large blocks go between device and host; otherwise on either.
    """
    _check(source, source_blocks, target, target_blocks)
    devices = {pool.device for pool in (source, target) if pool.device.type != "cpu"}
    device = devices.pop() if devices else source.device
    if source.device == target.device:
        _launch(source, source_blocks, target, target_blocks, device, COPY_PROGRAMS)
    elif source[0].numel() * source.element_size() < LARGE_BLOCK:
        _launch(source, source_blocks, target, target_blocks, device, BUS_PROGRAMS)
    else:
        for first, to, count in runs(source_blocks.tolist(), target_blocks.tolist()):
            target[to : to + count].copy_(source[first : first + count], non_blocking=True)


def _check(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    if source.shape[1:] != target.shape[1:] or source.dtype is not target.dtype:
        refuse("target", target, f"blocks of {tuple(source.shape[1:])} of {source.dtype} are needed")
    for name, pool in (("source", source), ("target", target)):
        if not pool.is_contiguous():
            refuse(name, pool, "a contiguous pool is needed")
        if pool.device.type == "cpu" and source.device != target.device and not pool.is_pinned():
            refuse(name, pool, "pinned memory is needed to move blocks between it and a device")
    check_column("source_blocks", source_ids, len(source_ids), torch.int64)
    check_column("target_blocks", target_ids, len(source_ids), torch.int64)


def _launch(
    source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor, device: torch.device, programs: int
) -> None:
    count = len(source_ids)
    if count == 0:
        return
    source_words, target_words = (pool.flatten(1).view(torch.int64) for pool in (source, target))
    block_words = source_words.shape[1]
    chunks = triton.cdiv(block_words, _CHUNK)
    _move_blocks_kernel[(min(count * chunks, programs),)](
        source_words,
        target_words,
        _brought(source_ids, device),
        _brought(target_ids, device),
        count * chunks,
        block_words,
        chunks,
        CHUNK=_CHUNK,
        num_warps=8,
    )


def _brought(ids: Tensor, device: torch.device) -> Tensor:
    """Ids on the device, without waiting for its stream, as a copy out of memory that is not pinned may. torch keeps
    pinned memory that is dropped until the copies out of it are over."""
    return ids if ids.device == device else ids.pin_memory().to(device, non_blocking=True)


def variants() -> list[Variant]:
    """The one kernel there is."""
    return [
        Variant(
            "8-byte words",
            _move_blocks_kernel,
            dict.fromkeys(("source_ptr", "target_ptr", "source_ids_ptr", "target_ids_ptr"), "*i64")
            | dict.fromkeys(("num_chunks", "block_words", "chunks_per_block"), "i32"),
            {"CHUNK": _CHUNK},
            num_warps=8,
            unaligned=frozenset({"num_chunks", "chunks_per_block"}),
        )
    ]
