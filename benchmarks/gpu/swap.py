"""Moves between the tiers: whether they are right, and their time against a plain copy of as many bytes between the
device and pinned memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gpu.bench import Bench
from gpu.model import Served
from gpu.rows import ORACLE, Row

_COMPARED_BLOCKS = 64


def measure_swap(bench: Bench, served: Served) -> Iterator[Row]:
    """Both directions, of scattered blocks. Raises RuntimeError where there is no host tier."""
    pool = served.pool
    count = pool.size.num_host_blocks
    if not count:
        raise RuntimeError("there is no host tier: the host's memory could not be locked")
    random = np.random.default_rng(0)
    on_device = torch.from_numpy(random.permutation(pool.size.num_device_blocks)[:count])
    on_host = torch.from_numpy(random.permutation(count))
    yield from _compared(bench, served, on_device[:_COMPARED_BLOCKS], on_host[:_COMPARED_BLOCKS])
    num_bytes = count * pool.layout.bytes_per_block
    plain = pool.host[:count]
    there = torch.empty_like(plain, device=bench.device.torch_device)
    for name, move, copy in (
        ("swap out", lambda: pool.swap_out(on_device, on_host), lambda: plain.copy_(there, non_blocking=True)),
        ("swap in", lambda: pool.swap_in(on_host, on_device), lambda: there.copy_(plain, non_blocking=True)),
    ):
        moving, copying = bench.eager_seconds(move), bench.eager_seconds(copy)
        yield Row(
            f"{name}, {count} blocks of {pool.layout.bytes_per_block >> 10} KiB",
            num_bytes / moving / 1e9,
            "GB/s",
            copying / moving,
            "of a plain pinned copy",
            at_least=0.9,
            facts={"bytes": num_bytes, "seconds": moving, "plain_seconds": copying},
        )


def _compared(bench: Bench, served: Served, on_device: Tensor, on_host: Tensor) -> Iterator[Row]:
    """Blocks of random numbers, there and back."""
    pool, there = served.pool, on_device.to(bench.device.torch_device)
    pool.device.normal_(generator=bench.generator(0))
    expected = pool.device[there].cpu()
    pool.swap_out(on_device, on_host)
    bench.device.synchronize()
    found = pool.host[on_host]
    pool.device[there] = 0
    pool.swap_in(on_host, on_device)
    bench.device.synchronize()
    for name, blocks in (("swap out", found), ("swap in", pool.device[there].cpu())):
        wrong = int((blocks != expected).flatten(1).any(dim=1).sum())
        verdict = "NOT EQUAL" if wrong else "equal"
        yield Row(f"{name}: {verdict}", wrong, f"of {len(blocks)} blocks differ", wrong, ORACLE, at_most=0.0)
