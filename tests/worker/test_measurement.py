from __future__ import annotations

from octavo_kernels import Backend
from octavo_worker.measurement import measure_prefill, measure_swap
from octavo_worker.models.decoder import Decoder
from tests.worker.conftest import make_executor


def test_rates_are_measured_and_the_pool_is_left_empty(decoder: Decoder, backend: Backend) -> None:
    pool = make_executor(decoder, backend).pool
    assert measure_prefill(decoder, pool, backend) >= 0  # 0 on a machine that is too busy to measure
    assert measure_swap(pool) > 0
    assert not pool.device.any()
    assert not pool.host.any()


def test_pools_that_are_too_small_are_not_measured(decoder: Decoder, backend: Backend) -> None:
    pool = make_executor(decoder, backend, num_blocks=1, num_host_blocks=0).pool
    assert measure_prefill(decoder, pool, backend) == 0
    assert measure_swap(pool) == 0
    assert not pool.device.any()
