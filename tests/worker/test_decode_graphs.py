from __future__ import annotations

import logging

import pytest
import torch

from octavo_kernels import Backend
from octavo_kernels.decode_state import DecodeInputs
from octavo_worker.decode_graphs import DecodeGraphs
from octavo_worker.kv_pool import KVPool, PoolSize
from octavo_worker.models.decoder import Decoder
from tests.worker.conftest import BLOCK_SIZE, layout_of
from tests.worker.late_device import LateDevice

NUM_BLOCKS = 8


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def pool(decoder: Decoder, backend: Backend) -> KVPool:
    return KVPool(layout_of(decoder, backend), PoolSize(NUM_BLOCKS, 0), backend, num_scratch_blocks=1)


@pytest.fixture
def graphs(decoder: Decoder, pool: KVPool, device: LateDevice, caplog: pytest.LogCaptureFixture) -> DecodeGraphs:
    inputs = DecodeInputs.empty(4, 4, block_size=BLOCK_SIZE, scratch_block=NUM_BLOCKS, device=torch.device("cpu"))
    ticks: list[None] = []
    with caplog.at_level(logging.INFO):
        graphs = DecodeGraphs(decoder, pool, device, inputs, (1, 2, 4), lambda: ticks.append(None))
    assert len(ticks) == 3
    assert "recorded 3 of 3 graphs of decode steps" in caplog.text
    return graphs


def test_a_batch_takes_the_smallest_that_holds_it(graphs: DecodeGraphs) -> None:
    assert [graphs.bucket(count) for count in range(1, 6)] == [1, 2, 4, 4, None]
    assert graphs.largest == 4


def test_recording_writes_to_the_scratch_block_alone(graphs: DecodeGraphs, pool: KVPool) -> None:
    assert not pool.device[:NUM_BLOCKS].any()
    assert pool.device[NUM_BLOCKS].any()


def test_a_replay_computes_what_the_inputs_hold_now(
    graphs: DecodeGraphs, decoder: Decoder, pool: KVPool, device: LateDevice
) -> None:
    inputs = graphs.inputs
    inputs.token_ids[:2] = torch.tensor([5, 9])
    inputs.slots[0], inputs.block_tables[0, 0] = 3 * BLOCK_SIZE, 3
    hidden = graphs.replay(2)
    assert device.log[-1] == "replay 2"
    expected = decoder.hidden(inputs.token_ids[:2], inputs.batch(2), pool.layers)
    torch.testing.assert_close(hidden, expected)
    first = hidden.clone()
    inputs.token_ids[0] = 6
    assert graphs.replay(2) is hidden  # the same memory
    assert not torch.equal(hidden[0], first[0])
