"""Moves between the tiers against a plain copy of as many bytes between the device and pinned memory."""

from __future__ import annotations

import numpy as np
import torch

from gpu.bench import Bench
from gpu.model import Served
from gpu.rows import Row


def measure_swap(bench: Bench, served: Served) -> list[Row]:
    """Both directions, of scattered blocks."""
    pool = served.pool
    count = pool.size.num_host_blocks
    random = np.random.default_rng(0)
    on_device = torch.from_numpy(random.permutation(pool.size.num_device_blocks)[:count])
    on_host = torch.from_numpy(random.permutation(count))
    num_bytes = count * pool.layout.bytes_per_block
    plain = pool.host[:count]
    there = torch.empty_like(plain, device=bench.device.torch_device)
    rows = []
    for name, move, copy in (
        ("swap out", lambda: pool.swap_out(on_device, on_host), lambda: plain.copy_(there, non_blocking=True)),
        ("swap in", lambda: pool.swap_in(on_host, on_device), lambda: there.copy_(plain, non_blocking=True)),
    ):
        moving, copying = bench.eager_seconds(move), bench.eager_seconds(copy)
        rows.append(
            Row(
                f"{name}, {count} blocks of {pool.layout.bytes_per_block >> 10} KiB",
                num_bytes / moving / 1e9,
                "GB/s",
                copying / moving,
                "of a plain pinned copy",
                "0.9 or more",
                {"bytes": num_bytes, "seconds": moving, "plain_seconds": copying},
            )
        )
    return rows
