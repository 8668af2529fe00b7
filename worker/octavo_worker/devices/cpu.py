"""The CPU as a device: every call is over when it returns, so nothing is staged, waited for or recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_worker.memory import free_host_memory, populate, reserve


@dataclass(frozen=True)
class _Here:
    """A download that never had to travel."""

    values: Tensor
    is_over: bool = True

    def wait(self) -> None:
        return

    def numpy(self) -> NDArray[Any]:
        return self.values.numpy().copy()


class _Again:
    """A graph that does the work anew, into the same output."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work = work
        self.output = work()

    def replay(self) -> None:
        self.output.copy_(self._work())


class CpuDevice:
    """See `base.Device`."""

    is_asynchronous = False
    shares_host_memory = True

    def __init__(self, device: torch.device | None = None) -> None:
        self.torch_device = device or torch.device("cpu")

    def upload(self, columns: Sequence[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]

    def download(self, values: Tensor) -> _Here:
        return _Here(values)

    def synchronize(self) -> None:
        return

    def reserve(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not (num_bytes := math.prod(shape) * dtype.itemsize):
            return torch.zeros(tuple(shape), dtype=dtype)
        return torch.frombuffer(reserve(num_bytes), dtype=dtype).view(*shape)

    def populate(self, reserved: Tensor) -> bool:
        return populate(reserved.data_ptr(), reserved.nbytes)

    def lock(self, host: Tensor) -> None:
        return

    def free_memory(self) -> int:
        return free_host_memory()

    def peak_memory(self, work: Callable[[], object]) -> int:
        work()
        return 0

    def capture(self, work: Callable[[], Tensor]) -> _Again:
        return _Again(work)
