"""What the CUDA device asks of CUDA, and in which order: CUDA itself is a fake that writes it down."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend
from octavo_worker.devices import CpuDevice, find_device, open_device
from octavo_worker.devices import cuda as cuda_module
from octavo_worker.devices.cuda import CudaDevice
from octavo_worker.executor import Executor
from octavo_worker.models.decoder import Decoder
from octavo_worker.run_ahead import RunAhead
from tests.worker.conftest import generate, new_sequence, schedule

CPU = torch.device("cpu")


class Cuda:
    """As much of torch.cuda as the device uses. Marks are passed once a test says so, or they are waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "main"
        self.free, self.reserved, self.peak = 1000, 300, 0
        self.register_error: str | None = None
        self.is_lost = False
        self.last_error: str | None = None  # of a call that nobody has asked about
        self._numbers, self._memories = itertools.count(), itertools.count()

    def Event(self, blocking: bool = False) -> Event:
        return Event(self, next(self._numbers), blocking)

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "side")

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self, self.current)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> str:
        self.log.append("new memory for graphs")
        return f"memory {next(self._memories)}"

    def CUDAGraph(self) -> SimpleNamespace:
        def replay() -> None:
            assert torch.is_inference_mode_enabled()
            self.log.append("replay")

        return SimpleNamespace(replay=replay)

    @contextlib.contextmanager
    def graph(self, graph: object, *, pool: str, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert torch.is_inference_mode_enabled()
        self.log.append(f"capture on {stream.name} in {pool}, {capture_error_mode}")
        with self.stream(stream):
            yield
        self.log.append("captured")

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")
        if self.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def empty_cache(self) -> None:
        self.log.append("empty cache")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 2000

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.reserved

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.peak

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: (address, size, flags),
            cudaHostUnregister=lambda address: self.log.append(f"unlock {address}"),
        )

    def check_error(self, asked: tuple[int, int, int]) -> None:
        if self.register_error is not None:
            self.last_error = self.register_error
            raise RuntimeError(self.register_error)
        self.log.append(f"lock {asked[1]} bytes")


class Event:
    def __init__(self, cuda: Cuda, number: int, blocking: bool) -> None:
        self.cuda, self.name = cuda, f"{'blocking ' if blocking else ''}event {number}"
        self.is_passed = False

    def record(self) -> None:
        self.cuda.log.append(f"{self.name} on {self.cuda.current}")

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.cuda.log.append(f"wait for {self.name}")
        self.is_passed = True


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    for name in dir(cuda):
        if not name.startswith("_") and callable(getattr(cuda, name)):
            monkeypatch.setattr(torch.cuda, name, getattr(cuda, name), raising=False)

    def pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        cuda.log.append(f"pin {tuple(shape)}")
        return torch.zeros(tuple(shape), dtype=dtype)

    monkeypatch.setattr(cuda_module, "_pinned", pinned)
    return cuda


@pytest.fixture
def device(cuda: Cuda) -> CudaDevice:
    device = CudaDevice(CPU)  # its tensors lie where there is a device to put them on
    cuda.log.clear()
    return device


def test_cuda_is_opened_as_such(cuda: Cuda) -> None:
    opened = open_device(torch.device("cuda"))
    assert isinstance(opened, CudaDevice)
    assert opened.is_asynchronous
    assert not opened.shares_host_memory


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_cuda_is_taken_where_it_is(name: str, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(find_device(name), CudaDevice)


def test_an_upload_is_one_copy_with_a_mark_behind_it(device: CudaDevice, cuda: Cuda) -> None:
    first, second = device.upload([np.arange(3, dtype=np.int32), np.array([1.5], np.float32)])
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [1.5])
    assert cuda.log == ["event 0 on main"]


def test_a_download_is_a_copy_into_pinned_memory_and_a_mark(device: CudaDevice, cuda: Cuda) -> None:
    download = device.download(torch.tensor([4, 5]))
    assert cuda.log == ["pin (2,)", "blocking event 0 on main"]
    assert not download.is_over
    download.wait()
    assert cuda.log[2:] == ["wait for blocking event 0"]
    assert download.is_over
    assert download.numpy().tolist() == [4, 5]


def test_a_capture_runs_warm_first_and_behind_what_is_in_the_queue(device: CudaDevice, cuda: Cuda) -> None:
    output = torch.zeros(1)

    def work() -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        cuda.log.append(f"work on {cuda.current}")
        return output

    graph = device.capture(work)
    assert cuda.log == [
        "new memory for graphs",
        "side waits for main",
        "work on side",
        "work on side",
        "main waits for side",
        "capture on side in memory 0, thread_local",
        "work on side",
        "captured",
    ]
    assert graph.output is output
    cuda.log.clear()
    graph.replay()
    device.capture(work)
    assert cuda.log[0] == "replay"
    assert "new memory for graphs" not in cuda.log


def test_graphs_share_memory_as_long_as_one_of_them_lives(device: CudaDevice, cuda: Cuda) -> None:
    def fails_in_capture() -> torch.Tensor:
        if next(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    calls = itertools.count()

    def memories() -> list[str]:
        taken = [entry.split(" in ")[1] for entry in cuda.log if entry.startswith("capture on")]
        cuda.log.clear()
        return [entry.split(",")[0] for entry in taken]

    first, second = (device.capture(lambda: torch.zeros(1)) for _ in range(2))
    del first
    third = device.capture(lambda: torch.zeros(1))
    assert memories() == ["memory 0"] * 3
    del second, third
    fourth = device.capture(lambda: torch.zeros(1))
    assert memories() == ["memory 1"]
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(fails_in_capture)
    fifth = device.capture(lambda: torch.zeros(1))
    assert memories() == ["memory 1", "memory 2"]
    assert fourth is not fifth


def test_peak_memory_is_that_of_the_work_alone(device: CudaDevice, cuda: Cuda) -> None:
    def work() -> None:
        cuda.log.append("work")
        cuda.peak = 750

    assert device.peak_memory(work) == 450
    assert cuda.log == ["synchronize", "empty cache", "work", "synchronize", "empty cache"]


def test_free_memory_counts_what_torch_only_keeps(device: CudaDevice, cuda: Cuda) -> None:
    assert device.free_memory() == 1000
    assert cuda.log == ["empty cache"]


def test_host_memory_is_locked_or_told_of(device: CudaDevice, cuda: Cuda) -> None:
    host = torch.zeros(16, dtype=torch.uint8)
    device.lock(host)
    assert cuda.log == ["lock 16 bytes"]
    cuda.register_error = "CUDA error: out of memory"
    with pytest.raises(ConfigError, match=r"cannot be locked in memory \(CUDA error: out of memory\)"):
        device.lock(host)


def test_work_goes_on_behind_memory_that_cannot_be_locked(
    device: CudaDevice, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros

    def launch(*shape: Any, **options: Any) -> torch.Tensor:
        error, cuda.last_error = cuda.last_error, None
        if error is not None:
            raise RuntimeError(error)
        return zeros(*shape, **options)

    host = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch, "zeros", launch)
    cuda.register_error = "CUDA error: out of memory"
    with pytest.raises(ConfigError, match="cannot be locked"):
        device.lock(host)
    assert device.reserve((4,), torch.uint8).tolist() == [0] * 4


@pytest.mark.parametrize("is_lost", [False, True])
def test_host_memory_is_unlocked_when_its_last_holder_is_gone(is_lost: bool, device: CudaDevice, cuda: Cuda) -> None:
    cuda.is_lost = is_lost
    host = CpuDevice().reserve((4, 1024), torch.uint8)
    address, view = host.data_ptr(), host[1:]
    device.lock(host)
    del host
    assert cuda.log == ["lock 4096 bytes"]
    del view
    assert cuda.log[1:] == ["synchronize", f"unlock {address}"]


def test_an_executor_stages_and_fetches_through_it(
    device: CudaDevice, decoder: Decoder, backend: Backend, executor: Executor
) -> None:
    sampling = {"temperature": 0.9, "seed": 3, "top_p": 0.9, "return_logprobs": True, "top_logprob_count": 2}
    prompt = [3, 14, 15, 92, 65]
    expected = generate(executor, new_sequence(1, prompt, [0, 1, 2], **sampling), 6)
    ahead = RunAhead(decoder, executor.pool, backend, device)
    late = Executor(decoder, executor.pool, backend, max_batched_tokens=64, device=device, ahead=ahead)
    sequence = new_sequence(1, prompt, [0, 1, 2], **sampling)
    steps = [late.begin(pb.StepPlan(new_sequences=[sequence], scheduled=schedule((1, 0, 5, True))))]
    steps += [late.begin(pb.StepPlan(scheduled=schedule((1, 5 + number, 1, True)))) for number in range(5)]
    assert [token for step in steps for token in step.finish().token_ids] == expected
