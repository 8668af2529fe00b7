from __future__ import annotations

import dataclasses

import pytest

from octavo_kernels import Backend
from octavo_worker import measurement
from octavo_worker.measurement import measure_prefill, measure_swap
from octavo_worker.models.decoder import Decoder
from tests.worker.conftest import make_executor


def test_rates_are_measured_and_the_pool_is_left_empty(decoder: Decoder, backend: Backend) -> None:
    pool = make_executor(decoder, backend).pool
    assert measure_prefill(decoder, pool, backend) >= 0  # 0 on a machine that is too busy to measure
    assert measure_swap(pool) > 0
    assert not pool.device.any()
    assert not pool.host.any()


def test_a_model_of_short_sequences_is_measured_by_the_tokens_it_takes(
    decoder: Decoder, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_executor(decoder, backend).pool
    monkeypatch.setattr(measurement, "_time_pass", lambda decoder, pool, backend, num_tokens: 0.1)
    short = dataclasses.replace(decoder.config, max_model_len=40)
    monkeypatch.setattr(decoder, "config", short)
    assert measure_prefill(decoder, pool, backend) == 40 / 0.1


def test_pools_that_are_too_small_are_not_measured(decoder: Decoder, backend: Backend) -> None:
    pool = make_executor(decoder, backend, num_blocks=1, num_host_blocks=0).pool
    assert measure_prefill(decoder, pool, backend) == 0
    assert measure_swap(pool) == 0
    assert not pool.device.any()
