"""CUDA as a device: pinned staging, downloads behind events, CUDA graphs.

All computing is on the current stream of the executor's thread; moves between tiers have streams of their own
(`block_ops`).
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.config import GIB
from octavo.errors import ConfigError
from octavo_worker.devices.staging import StagingRing

_WARM_UPS = 2
_PORTABLE_AND_MAPPED = 3  # cudaHostRegister's flags: for every context, and readable by kernels


class _Copy:
    """A download into pinned memory, and the event behind it."""

    def __init__(self, values: Tensor, host: Tensor, event: torch.cuda.Event) -> None:
        self._host, self._event = host, event
        host.copy_(values, non_blocking=True)
        event.record()

    @property
    def is_over(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def numpy(self) -> NDArray[Any]:
        self._event.synchronize()
        return self._host.numpy().copy()


class _Replay:
    """A captured CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph, self.output = graph, output

    @torch.inference_mode()
    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    """See `base.Device`."""

    is_asynchronous = True
    shares_host_memory = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._staging = StagingRing(lambda num_bytes: _pinned((num_bytes,), torch.uint8), torch.cuda.Event)
        self._graph_memory: Any = None
        self._graph_stream: Any = None
        self._graphs: weakref.WeakSet[_Replay] = weakref.WeakSet()

    def upload(self, columns: Sequence[NDArray[Any]]) -> list[Tensor]:
        return self._staging.upload(columns, self.torch_device)

    def download(self, values: Tensor) -> _Copy:
        # torch's allocator of pinned memory keeps a freed buffer until the copies into it are over. A thread that waits
        # for a blocking event sleeps, and leaves its core to the others.
        host = _pinned(values.shape, values.dtype)
        return _Copy(values, host, torch.cuda.Event(blocking=True))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def reserve(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)

    def populate(self, reserved: Tensor) -> bool:
        return False  # the device's memory is all there

    def lock(self, host: Tensor) -> None:
        """By CUDA itself: torch's own allocator of pinned memory rounds up to a power of two, up to twice what was
        counted. Until the memory goes, whoever holds it last."""
        try:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, _PORTABLE_AND_MAPPED)
            )
        except RuntimeError as error:
            _forget_last_error(self.torch_device)
            raise ConfigError(
                f"the host tier of {host.nbytes / GIB:.2f} GiB cannot be locked in memory ({error}); "
                "give a smaller --swap-space"
            ) from None
        weakref.finalize(host.untyped_storage(), _unlock, host.data_ptr(), self.torch_device)

    def free_memory(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def peak_memory(self, work: Callable[[], object]) -> int:
        self.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        work()
        self.synchronize()
        peak = torch.cuda.max_memory_reserved(self.torch_device)
        gc.collect()
        torch.cuda.empty_cache()
        return max(0, peak - before)

    @torch.inference_mode()
    def capture(self, work: Callable[[], Tensor]) -> _Replay:
        """Kernels are compiled and libraries set up by the first calls, which a capture does not allow.

        All of it is in inference mode, whatever the caller is in: state of torch's generator that one capture has made
        in it is written by all others, and by each replay.
        """
        if self._graph_memory is None or not self._graphs:  # torch takes no memory whose graphs are all gone
            self._graph_memory = torch.cuda.graph_pool_handle()
        self._graph_stream = self._graph_stream or torch.cuda.Stream(self.torch_device)
        side, memory = self._graph_stream, self._graph_memory
        side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream(self.torch_device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate while this one captures: only this thread's calls belong to the graph.
        self._graph_memory = None  # nor memory of a capture that failed
        with torch.cuda.graph(graph, pool=memory, stream=side, capture_error_mode="thread_local"):
            output = work()
        self._graph_memory = memory
        replay = _Replay(graph, output)
        self._graphs.add(replay)
        return replay


def _forget_last_error(device: torch.device) -> None:
    """CUDA keeps the error of a call that torch does not check, and the next launch of a kernel would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unlock(address: int, device: torch.device) -> None:
    """Undoes `lock`, behind the copies that are under way."""
    with contextlib.suppress(RuntimeError):  # a device that has failed copies no more
        torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)  # what it returns is of use to nobody any more


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of the host that the device copies from and to by itself."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
