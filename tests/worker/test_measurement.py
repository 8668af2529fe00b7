from __future__ import annotations

import pytest

from octavo_kernels import Backend
from octavo_worker import measurement
from octavo_worker.kv_pool import KVPool
from octavo_worker.measurement import measure_prefill, measure_swap
from octavo_worker.models.decoder import Decoder
from tests.worker.conftest import make_executor


def test_rates_are_measured_and_the_pool_is_left_empty(decoder: Decoder, backend: Backend) -> None:
    pool = make_executor(decoder, backend).pool
    assert measure_prefill(decoder, pool, backend) > 0
    assert measure_swap(pool) > 0
    assert not pool.device.any()
    assert not pool.host.any()


@pytest.mark.parametrize(("seconds_a_token", "expected", "passes"), [(0.001, 1000, [16, 128]), (0.01, 100, [16])])
def test_long_pass_is_left_out_where_it_would_hold_up_the_start(
    seconds_a_token: float,
    expected: float,
    passes: list[int],
    decoder: Decoder,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []

    def time_pass(_: Decoder, __: KVPool, ___: Backend, num_tokens: int) -> float:
        computed.append(num_tokens)
        return num_tokens * seconds_a_token

    monkeypatch.setattr(measurement, "_time_pass", time_pass)
    rate = measure_prefill(decoder, make_executor(decoder, backend).pool, backend)
    assert (rate, computed) == (pytest.approx(expected), passes)


def test_small_pools(decoder: Decoder, backend: Backend) -> None:
    pool = make_executor(decoder, backend, num_blocks=1, num_host_blocks=0).pool
    assert measure_prefill(decoder, pool, backend) > 0
    assert measure_swap(pool) == 0
    assert not pool.device.any()
