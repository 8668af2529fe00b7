from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.config import GIB, WorkerConfig
from octavo.errors import ConfigError
from octavo_kernels import Backend, KVLayout
from octavo_worker import kv_pool
from octavo_worker.devices import CpuDevice, Device
from octavo_worker.kv_pool import KVPool, PoolSize, layout_name, size_pool

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)


class DeviceBeside(CpuDevice):
    """One with memory of its own."""

    shares_host_memory = False


CPU, BESIDE = CpuDevice(), DeviceBeside()


def sized(device: Device = CPU, *, free: int = 10 * GIB, weights: int = GIB, **settings: Any) -> PoolSize:
    return size_pool(
        WorkerConfig(**{"swap_space": 0.0, **settings}),
        LAYOUT,
        device,
        free_at_start=free,
        free_now=free - weights,
        free_host=free - weights,
    )


def test_bytes_of_a_block() -> None:
    assert LAYOUT.bytes_per_block == 2 * 30 * 3 * 64 * 16 * 2 == 368_640


def test_quantized_blocks_are_smaller() -> None:
    layout = dataclasses.replace(LAYOUT, dtype=torch.int8)
    size = size_pool(
        WorkerConfig(swap_space=1.0),
        layout,
        CPU,
        free_at_start=10 * GIB,
        free_now=9 * GIB,
        free_host=9 * GIB,
    )
    assert layout.bytes_per_block == 2 * 30 * 3 * (64 + 4) * 16 == 195_840
    assert size == PoolSize(4 * GIB // 195_840, GIB // 195_840)
    assert (layout_name(LAYOUT), layout_name(layout)) == (
        "block-major,k=d*t,v=t*d",
        "block-major,k=d*t,v=t*d,scales=t",
    )


def test_cap_holds_on_the_cpu_only() -> None:
    assert sized().num_device_blocks == 4 * GIB // 368_640
    assert sized(kv_cache_memory=1.5).num_device_blocks == int(1.5 * GIB) // 368_640
    assert sized(kv_cache_memory=0).num_device_blocks == 8 * GIB // 368_640  # 0.9 x 10 GiB - 1 GiB of weights
    assert sized(BESIDE).num_device_blocks == 8 * GIB // 368_640


def test_utilization_counts_the_weights() -> None:
    size = sized(kv_cache_memory=0, gpu_memory_utilization=0.5, weights=2 * GIB)
    assert size.num_device_blocks == 3 * GIB // 368_640


def test_host_tier_beside_the_cap() -> None:
    size = sized(swap_space=2)
    assert (size.num_device_blocks, size.num_host_blocks) == (4 * GIB // 368_640, 2 * GIB // 368_640)


def test_tiers_share_what_is_too_little_for_both() -> None:
    size = sized(free=5 * GIB, weights=int(0.5 * GIB), swap_space=4, kv_cache_memory=4)  # 4 GiB for wishes of 8
    assert size.num_device_blocks == size.num_host_blocks == 2 * GIB // 368_640


@pytest.mark.parametrize(
    ("free", "settings"),
    [
        (10 * GIB, {"kv_cache_memory": 0}),
        (10 * GIB, {"swap_space": 500}),
        (3 * GIB, {"swap_space": 1, "num_device_blocks": 6000}),
        (GIB // 8, {"gpu_memory_utilization": 1.0}),
        (5 << 20, {"swap_space": 1, "gpu_memory_utilization": 1.0}),
    ],
)
def test_tiers_never_exceed_what_may_be_taken(
    free: int, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    size = sized(free=free, weights=0, **{"swap_space": 1.0, **settings})
    budget = free * settings.get("gpu_memory_utilization", 0.9)
    assert (size.num_device_blocks + size.num_host_blocks) * 368_640 <= budget
    assert size.num_device_blocks >= 4
    assert "that swap_space allows: no more of the host's memory may be taken" in caplog.text


def test_host_tier_is_on_by_default_and_quiet_where_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    assert sized(swap_space=WorkerConfig().swap_space).num_host_blocks == GIB // 368_640
    assert not caplog.records


def test_few_device_blocks_come_before_the_host_tier(caplog: pytest.LogCaptureFixture) -> None:
    size = sized(free=5 * 368_640, weights=0, swap_space=1, gpu_memory_utilization=1.0)
    assert size == PoolSize(4, 1)
    assert "the host tier gets 0.35 MiB of the 1.00 GiB that swap_space allows" in caplog.text


def test_asked_number_of_blocks() -> None:
    assert sized(num_device_blocks=7) == PoolSize(7, 0)
    with pytest.raises(
        ConfigError, match=r"num_device_blocks is 1000000: that is 343\.32 GiB, but only 8\.00 GiB of 9\.00 GiB"
    ):
        sized(num_device_blocks=1_000_000)


def test_too_little_memory_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"4 blocks of 16 tokens need 1\.41 MiB; free memory is 1\.00 MiB"):
        sized(free=1 << 20, weights=0)


def test_host_tier_of_a_gpu_takes_its_share_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    size = sized(BESIDE, swap_space=100)
    assert size == PoolSize(8 * GIB // 368_640, int(0.9 * 9 * GIB) // 368_640)
    assert "the host tier gets 8.10 GiB of the 100.00 GiB that swap_space allows" in caplog.text


def test_blocks_move_between_tiers(backend: Backend) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype=torch.float32)
    pool = KVPool(layout, PoolSize(5, 3), backend)
    assert pool.device.shape == (5, 2, 2, 1, 32)
    assert not pool.device.any()
    pool.device[1], pool.device[4] = 1.0, 4.0
    moved = pool.swap_out(torch.tensor([4, 1]), torch.tensor([0, 2]))
    assert moved == 2 * layout.bytes_per_block
    pool.device.zero_()
    assert pool.swap_in(torch.tensor([0]), torch.tensor([3])) == layout.bytes_per_block
    pool.copy(torch.tensor([3]), torch.tensor([0]))
    assert [float(block.mean()) for block in pool.device] == [4, 0, 0, 4, 0]


def test_quantized_blocks_move_with_their_scales(backend: Backend) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype=torch.int8)
    pool = KVPool(layout, PoolSize(5, 3), backend)
    assert pool.device.shape == (5, 2, 2, 1, 64)
    assert pool.device.dtype is pool.host.dtype is torch.uint8
    ones = torch.ones(1, 1, 4)
    for layer in pool.layers:
        backend.write_kv(ones * 2, ones * 5, layer, torch.tensor([35], dtype=torch.int32))
    kept = pool.device[4].clone()
    pool.swap_out(torch.tensor([4]), torch.tensor([2]))
    pool.device.zero_()
    pool.swap_in(torch.tensor([2]), torch.tensor([1]))
    pool.copy(torch.tensor([1]), torch.tensor([3]))
    assert torch.equal(pool.device[1], kept)
    assert torch.equal(pool.device[3], kept)
    assert float(pool.layers[1].v_scales[3, 0, 3] * pool.layers[1].v[3, 0, 3, 0]) == 5.0  # type: ignore[index]


def test_memory_comes_ahead_of_the_blocks_that_are_used(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype=torch.float32)
    block = layout.bytes_per_block
    monkeypatch.setattr(kv_pool, "_AHEAD_BYTES", 5 * block)
    monkeypatch.setattr(kv_pool, "_POPULATED_AT_ONCE", 2 * block)
    pool = KVPool(layout, PoolSize(16, 3), backend)
    asked: list[tuple[str, int, int]] = []

    def populate(_: CpuDevice, reserved: Tensor) -> bool:
        tier = pool.device if reserved.data_ptr() - pool.device.data_ptr() in range(pool.device.nbytes) else pool.host
        first = (reserved.data_ptr() - tier.data_ptr()) // block
        asked.append(("device" if tier is pool.device else "host", first, first + len(reserved)))
        return True

    monkeypatch.setattr(CpuDevice, "populate", populate)

    def asked_while_idle() -> list[tuple[str, int, int]]:
        asked.clear()
        while pool.populate_ahead():
            pass
        return list(asked)

    assert asked_while_idle() == [("device", 0, 2), ("device", 2, 4), ("device", 4, 5)]
    assert asked_while_idle() == []
    pool.will_use(np.array([0, 1, 2]))
    assert asked_while_idle() == [("device", 5, 7), ("device", 7, 8)]
    pool.will_use(np.array([1]))
    pool.will_use(np.array([], np.int64))
    assert asked_while_idle() == []
    pool.will_use(np.array([9]))  # those up to it came without us
    assert asked_while_idle() == [("device", 10, 12), ("device", 12, 14), ("device", 14, 15)]
    pool.will_use(np.array([10]))  # the device's end is near: the host is next
    assert asked_while_idle() == [("device", 15, 16), ("host", 0, 2), ("host", 2, 3)]


def test_memory_that_cannot_come_ahead_is_not_asked_for_again_at_once(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype=torch.float32)
    pool = KVPool(layout, PoolSize(8, 0), backend)
    monkeypatch.setattr(CpuDevice, "populate", lambda *_: False)
    assert not pool.populate_ahead()
