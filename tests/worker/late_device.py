"""A device that answers late, for tests: it computes at once, on the CPU, but hands out values only when told, or
waited for. It writes down in which order it is asked for what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels import Backend
from octavo_kernels.decode_state import DecodeInputs
from octavo_worker.decode_graphs import DecodeGraphs
from octavo_worker.devices import CpuDevice
from octavo_worker.executor import Executor
from octavo_worker.kv_pool import KVPool, PoolSize
from octavo_worker.models.decoder import Decoder
from octavo_worker.run_ahead import RunAhead
from tests.worker.conftest import BLOCK_SIZE, layout_of


class LateDownload:
    """Values that are there once `arrived` is set. Waiting for them is written down, and has them arrive."""

    def __init__(self, device: LateDevice, number: int, values: Tensor) -> None:
        self._device, self._number, self._values = device, number, values.clone()
        self.arrived = threading.Event()

    @property
    def is_over(self) -> bool:
        return self.arrived.is_set()

    def wait(self) -> None:
        if self._device.waits_for_arrival:
            self.arrived.wait(20)

    def numpy(self) -> NDArray[Any]:
        if not self.arrived.is_set():
            self._device.log.append(f"wait {self._number}")
            self.arrived.set()
        if self._device.has_failed:
            raise RuntimeError("the device is gone")
        return self._values.numpy().copy()


class LateGraph:
    """Does its work again, into the memory of the first time."""

    def __init__(self, device: LateDevice, work: Callable[[], Tensor]) -> None:
        self._device, self._work = device, work
        self.output = work().clone()
        device.log.append(f"capture {len(self.output)}")

    def replay(self) -> None:
        self._device.log.append(f"replay {len(self.output)}")
        self.output.copy_(self._work())


class LateDevice(CpuDevice):
    """See the module. waits_for_arrival: whether `wait` waits for a test to let values arrive; launched: released
    with every download, the last that a step asks for."""

    is_asynchronous = True
    shares_host_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.downloads: list[LateDownload] = []
        self.waits_for_arrival = False
        self.has_failed = False
        self.launched = threading.Semaphore(0)

    def upload(self, columns: Sequence[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(column.copy()) for column in columns]

    def download(self, values: Tensor) -> LateDownload:
        self.log.append(f"download {len(self.downloads)}")
        self.downloads.append(LateDownload(self, len(self.downloads), values))
        self.launched.release()
        return self.downloads[-1]

    def capture(self, work: Callable[[], Tensor]) -> LateGraph:
        return LateGraph(self, work)


def make_late_executor(
    decoder: Decoder,
    backend: Backend,
    device: LateDevice,
    *,
    sizes: Sequence[int] = (),
    num_blocks: int = 64,
    block_size: int = BLOCK_SIZE,
    kv_dtype: torch.dtype | None = None,
) -> Executor:
    """An executor that runs ahead on a device that answers late; sizes: of graphs."""
    layout = layout_of(decoder, backend, block_size, kv_dtype)
    pool = KVPool(layout, PoolSize(num_blocks, 8), backend, num_scratch_blocks=1)
    graphs = None
    if sizes:
        max_blocks = -(-decoder.config.max_model_len // block_size)
        inputs = DecodeInputs.empty(
            sizes[-1], max_blocks, block_size=block_size, scratch_block=num_blocks, device=backend.device
        )
        graphs = DecodeGraphs(decoder, pool, device, inputs, sizes)
    ahead = RunAhead(decoder, pool, backend, device, graphs)
    return Executor(decoder, pool, backend, max_batched_tokens=512, device=device, ahead=ahead)
