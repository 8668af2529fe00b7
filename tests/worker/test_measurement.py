from __future__ import annotations

import pytest

from octavo_kernels import Backend
from octavo_worker import measurement
from octavo_worker.devices import CpuDevice, Device
from octavo_worker.kv_pool import KVPool
from octavo_worker.measurement import measure_prefill, measure_swap
from octavo_worker.models.decoder import Decoder
from tests.worker.conftest import make_executor


def test_rates_are_measured_and_the_pool_is_left_empty(decoder: Decoder, backend: Backend) -> None:
    pool = make_executor(decoder, backend).pool
    assert measure_prefill(decoder, pool, CpuDevice(), 512) > 0
    assert measure_swap(pool, CpuDevice()) > 0
    assert not pool.device.any()
    assert not pool.host.any()


class DeviceBeside(CpuDevice):
    is_asynchronous = True
    shares_host_memory = False


@pytest.mark.parametrize(
    ("device", "most_tokens", "seconds_a_token", "expected", "passes"),
    [
        (CpuDevice(), 512, 0.001, 1000, [16, 128]),
        (CpuDevice(), 100, 0.001, 1000, [16, 100]),
        (CpuDevice(), 512, 0.01, 100, [16]),  # a longer one would hold up the start
        (CpuDevice(), 8, 0.001, 1000, [8]),
        (DeviceBeside(), 512, 0.01, 100, [16, 512]),
        (DeviceBeside(), 8192, 0.01, 100, [16, 2048]),
    ],
)
def test_as_many_tokens_are_measured_as_tell_of_the_device(
    device: Device,
    most_tokens: int,
    seconds_a_token: float,
    expected: float,
    passes: list[int],
    decoder: Decoder,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []

    def time_pass(_: Decoder, __: KVPool, ___: CpuDevice, num_tokens: int) -> float:
        computed.append(num_tokens)
        return num_tokens * seconds_a_token

    monkeypatch.setattr(measurement, "_time_pass", time_pass)
    monkeypatch.setattr(measurement, "_room", lambda *_: 4096)
    rate = measure_prefill(decoder, make_executor(decoder, backend).pool, device, most_tokens)
    assert (rate, computed) == (pytest.approx(expected), passes)


def test_small_pools(decoder: Decoder, backend: Backend) -> None:
    pool = make_executor(decoder, backend, num_blocks=1, num_host_blocks=0).pool
    assert measure_prefill(decoder, pool, CpuDevice(), 512) > 0
    assert measure_swap(pool, CpuDevice()) == 0
    assert not pool.device.any()
