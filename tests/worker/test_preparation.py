from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo_kernels.backend import AttentionBatch, LayerKV
from octavo_kernels.reference import ReferenceBackend
from octavo_worker.decode_graphs import buckets
from octavo_worker.devices import CpuDevice
from octavo_worker.executor import Executor
from octavo_worker.kv_pool import KVPool, PoolSize, size_pool
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from octavo_worker.preparation import NUM_SCRATCH_BLOCKS, memory_of_steps, prepare
from tests.worker.checkpoints import tiny_config, write_checkpoint
from tests.worker.conftest import generate, layout_of, load_decoder, new_sequence
from tests.worker.late_device import LateDevice


class EnqueuingBackend(ReferenceBackend):
    """One that says of itself that it does not wait for its device."""

    only_enqueues = True


class MeasuredDevice(LateDevice):
    """Tells sizes of its own for what works hold."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self._sizes = list(sizes)
        self.num_works = 0

    def peak_memory(self, work: Callable[[], object]) -> int:
        work()
        self.num_works += 1
        return self._sizes.pop(0)


@pytest.fixture
def enqueuing() -> EnqueuingBackend:
    return EnqueuingBackend()


def make_pool(decoder: Decoder, backend: ReferenceBackend) -> KVPool:
    return KVPool(layout_of(decoder, backend), PoolSize(24, 4), backend, NUM_SCRATCH_BLOCKS)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (3, (1, 2, 4)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 16)), (20, (1, 2, 4, 8, 16, 24))],
)
def test_buckets_hold_what_is_asked(most: int, expected: tuple[int, ...]) -> None:
    assert buckets(most) == expected


def test_buckets_end() -> None:
    assert buckets(10_000) == (1, 2, 4, *range(8, 257, 8))
    assert max(right - left for left, right in itertools.pairwise(buckets(256))) == 8


def test_memory_of_steps_is_that_of_the_largest_and_of_recorded_ones(
    decoder: Decoder, enqueuing: EnqueuingBackend
) -> None:
    layout = layout_of(decoder, enqueuing)
    config = WorkerConfig(max_num_batched_tokens=100)
    device = MeasuredDevice(1000, 20)
    assert memory_of_steps(config, decoder, enqueuing, device, layout) == 1020 + layout.bytes_per_block
    eager = WorkerConfig(max_num_batched_tokens=100, enforce_eager=True)
    device = MeasuredDevice(1000)
    assert memory_of_steps(eager, decoder, enqueuing, device, layout) == 1000 + layout.bytes_per_block
    assert device.num_works == 1
    device = MeasuredDevice(1000)  # what waits for its device is measured too, but nothing is recorded
    assert memory_of_steps(config, decoder, ReferenceBackend(), device, layout) == 1000


def test_the_pool_takes_what_steps_leave(decoder: Decoder, enqueuing: EnqueuingBackend) -> None:
    layout = layout_of(decoder, enqueuing)
    config = WorkerConfig(gpu_memory_utilization=0.5, swap_space=0.0)
    device = LateDevice()
    free, reserved = 1000 * layout.bytes_per_block, 100 * layout.bytes_per_block
    size = size_pool(config, layout, device, free_at_start=free, free_now=free - reserved, free_host=0)
    assert size.num_device_blocks == 400
    with pytest.raises(ConfigError, match="too little memory for KV blocks"):
        size_pool(config, layout, device, free_at_start=free, free_now=free - 5 * reserved, free_host=0)


def test_every_kind_of_step_is_done_once_and_decodes_are_recorded(
    decoder: Decoder, enqueuing: EnqueuingBackend, executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    device, pool = LateDevice(), make_pool(decoder, enqueuing)
    ticks: list[None] = []
    with caplog.at_level(logging.INFO):
        config = WorkerConfig(max_num_batched_tokens=96)
        ahead = prepare(config, decoder, pool, enqueuing, device, lambda: ticks.append(None))
    assert ahead is not None
    assert [message for message in caplog.messages if message.startswith("kernels are ready for 1 of 9")]
    assert "decode steps of up to 96 sequences are graphs" in caplog.text
    assert device.log == [f"capture {size}" for size in reversed(buckets(96))]
    assert len(ticks) == 9 + len(buckets(96))
    assert not pool.device[:-NUM_SCRATCH_BLOCKS].any()
    late = Executor(decoder, pool, enqueuing, max_batched_tokens=96, device=device, ahead=ahead)
    prompt = [3, 14, 15, 92, 65]
    expected = generate(executor, new_sequence(1, prompt, [0, 1, 2]), 9)
    assert generate(late, new_sequence(1, prompt, [0, 1, 2]), 9) == expected
    assert device.log.count("replay 1") == 8


class WatchingBackend(EnqueuingBackend):
    """Writes down what attention is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[AttentionBatch] = []

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: AttentionBatch, **options: Any) -> Tensor:
        self.batches.append(batch)
        return super().paged_attention(q, kv, batch, **options)


def test_steps_stay_in_the_blocks_there_are_and_end_where_texts_do(tmp_path: Path) -> None:
    watching, device = WatchingBackend(), LateDevice()
    decoder = load_decoder(open_checkpoint(find_model(str(write_checkpoint(tmp_path, tiny_config())))), watching)
    pool, config = make_pool(decoder, watching), WorkerConfig(max_num_batched_tokens=512, enforce_eager=True)
    prepare(config, decoder, pool, watching, device, lambda: None)
    size = pool.size.num_device_blocks
    assert {len(batch.positions) for batch in watching.batches} == {1, 2, 8, 16, 32, 40, 64, 128, 448, 512}
    assert max(int(batch.block_tables.max()) for batch in watching.batches) == size - 1
    assert max(int(batch.slots.max()) for batch in watching.batches) == size * pool.layout.block_size - 1
    assert max(int(batch.positions.max()) for batch in watching.batches) == decoder.config.max_model_len - 1
    assert (1, decoder.config.max_model_len) in {
        (len(batch.positions), int(batch.context_lens.max())) for batch in watching.batches
    }
    assert not pool.device.any()


def test_eager_steps_are_not_recorded(decoder: Decoder, enqueuing: EnqueuingBackend) -> None:
    device, pool = LateDevice(), make_pool(decoder, enqueuing)
    config = WorkerConfig(max_num_batched_tokens=32, enforce_eager=True)
    ahead = prepare(config, decoder, pool, enqueuing, device, lambda: None)
    late = Executor(decoder, pool, enqueuing, max_batched_tokens=32, device=device, ahead=ahead)
    generate(late, new_sequence(1, [5, 6], [0]), 3)
    assert not [entry for entry in device.log if entry.startswith(("capture", "replay"))]


def test_a_device_that_computes_as_it_is_called_needs_nothing(
    decoder: Decoder, backend: ReferenceBackend, enqueuing: EnqueuingBackend
) -> None:
    config = WorkerConfig(max_num_batched_tokens=64)
    for kernels, device in ((backend, LateDevice()), (enqueuing, CpuDevice())):
        layout = layout_of(decoder, kernels)
        assert memory_of_steps(config, decoder, kernels, device, layout) == 0
        assert prepare(config, decoder, make_pool(decoder, kernels), kernels, device, lambda: None) is None
