"""Limits are the smaller of what the settings say and what the worker can."""

from __future__ import annotations

import pytest

from octavo.config import RouterConfig
from octavo_router.request import Sampling
from octavo_router.served_model import ServedModel, limits_of
from tests.router.fake_client import description


@pytest.mark.parametrize(
    ("configured", "of_model", "num_blocks", "expected"),
    [(0, 2048, 1000, 2048), (512, 2048, 1000, 512), (4096, 2048, 1000, 2048), (0, 2048, 100, 400)],
)
def test_max_model_len(configured: int, of_model: int, num_blocks: int, expected: int) -> None:
    model = ServedModel.from_description(
        description(block_size=4, num_blocks=num_blocks, max_model_len=of_model),
        RouterConfig(max_model_len=configured, served_model_name=("first", "second")),
        default_sampling=Sampling(),
        created_unix_s=0.0,
    )
    assert model.max_model_len == expected
    assert model.names == ("first", "second")


def test_a_workers_limits_hold() -> None:
    described = description()
    described.max_plans_in_flight = 1
    described.max_batched_token_count = 100
    limits = limits_of(described, RouterConfig(max_plans_in_flight=4, max_num_batched_tokens=512))
    assert (limits.max_plans_in_flight, limits.max_num_batched_tokens) == (1, 100)
    described.max_plans_in_flight = 8
    described.max_batched_token_count = 0
    limits = limits_of(described, RouterConfig(max_plans_in_flight=4, max_num_batched_tokens=512))
    assert (limits.max_plans_in_flight, limits.max_num_batched_tokens) == (4, 512)


@pytest.mark.parametrize(
    ("configured", "offered", "expected"), [(0, 2048, 2048), (0, 0, 512), (300, 2048, 300), (300, 100, 100)]
)
def test_a_step_has_as_many_tokens_as_the_worker_offers_unless_told_otherwise(
    configured: int, offered: int, expected: int
) -> None:
    described = description()
    described.max_batched_token_count = offered
    assert limits_of(described, RouterConfig(max_num_batched_tokens=configured)).max_num_batched_tokens == expected


def test_a_step_has_a_token_for_everyone_in_the_batch() -> None:
    limits = limits_of(description(), RouterConfig(max_num_seqs=64, max_num_batched_tokens=16))
    assert limits.max_num_running == 16
