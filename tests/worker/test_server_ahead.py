"""Sessions with a device that answers late: plans are begun while it is at earlier ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from octavo_kernels import Backend
from octavo_worker.executor import Executor
from octavo_worker.models.decoder import Decoder
from tests.worker.conftest import generate, new_sequence
from tests.worker.late_device import LateDevice, make_late_executor
from tests.worker.test_server import PROMPT, Worker, decode, plan


@pytest.fixture
def device() -> LateDevice:
    device = LateDevice()
    device.waits_for_arrival = True
    return device


@pytest.fixture
async def worker(decoder: Decoder, backend: Backend, device: LateDevice) -> AsyncIterator[Worker]:
    async with Worker(make_late_executor(decoder, backend, device, sizes=(1, 2)), lease_s=30) as worker:
        device.log.clear()
        yield worker
        for download in device.downloads:
            download.arrived.set()


async def begun(device: LateDevice, count: int = 1) -> None:
    """Returns when so many more steps are in the device's queue."""
    for _ in range(count):
        assert await asyncio.to_thread(device.launched.acquire, timeout=20)


async def test_the_device_has_the_next_plan_before_it_answers(
    worker: Worker, device: LateDevice, executor: Executor
) -> None:
    stream = await worker.open()
    await stream.send(plan=plan())
    await stream.send(plan=decode(4))
    await begun(device, 2)
    tokens = []
    for number in range(5):
        device.downloads[number].arrived.set()
        response = await stream.result()
        assert response.step_seq == number + 1
        tokens += response.result.token_ids
        await stream.send(plan=decode(5 + number))
        await begun(device)  # while the device is still at the one before it
        assert not device.downloads[number + 1].arrived.is_set()
    assert tokens == generate(executor, new_sequence(1, PROMPT, [0, 1]), 5)
    assert device.log.count("replay 1") == 6


async def test_a_device_that_fails_ends_the_stream_and_nothing_more_is_begun(
    worker: Worker, device: LateDevice
) -> None:
    stream = await worker.open()
    await stream.send(plan=plan())
    await begun(device)
    device.has_failed = True
    device.downloads[0].arrived.set()
    assert await stream.status() == (grpc.StatusCode.INTERNAL, "the step failed: RuntimeError: the device is gone")
    device.has_failed = False
    again = await worker.open(epoch=2)
    await again.send(plan=plan(blocks=(2, 3)))
    await begun(device)
    device.downloads[1].arrived.set()
    assert len((await again.result()).result.token_ids) == 1


async def test_a_session_that_ends_with_steps_under_way_leaves_nothing_behind(
    worker: Worker, device: LateDevice, executor: Executor
) -> None:
    stream = await worker.open()
    await stream.send(plan=plan())
    await stream.send(plan=decode(4))
    await begun(device, 2)
    stream.call.cancel()
    late = await worker.open(epoch=2)
    await late.send(plan=plan(blocks=(4, 5)))
    await begun(device)
    for download in device.downloads:
        download.arrived.set()
    response = await late.result()
    assert response.step_seq == 1
    assert response.result.token_ids == generate(executor, new_sequence(1, PROMPT, [0, 1]), 1)
