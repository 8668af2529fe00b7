"""What the worker asks of a device, beside tensors and kernels.

On an asynchronous device a call only puts work into a queue, and the host goes on: what is uploaded must not be changed
under it, and answers come later. On a CPU the call is the work. Everything above is written for the first kind and runs
on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class Download(Protocol):
    """Values on their way to the host."""

    @property
    def is_over(self) -> bool:
        """Whether they are there. Does not wait."""
        ...

    def wait(self) -> None:
        """Waits until they are there; may be called from any thread. Raises what the device says where it failed."""
        ...

    def numpy(self) -> NDArray[Any]:
        """The values, once they are there: waits for them. A copy of the caller's own."""
        ...


class Graph(Protocol):
    """Work that was recorded once and is repeated on the same memory.

    output: what the recorded work returned; each replay overwrites it.
    """

    output: Tensor

    def replay(self) -> None:
        """Puts the recorded work into the device's queue again."""
        ...


class Device(Protocol):
    """One device of torch's.

    is_asynchronous: whether work goes on behind a call that has returned; then steps may be put into its queue before
    earlier ones are answered.
    shares_host_memory: whether its memory is the host's, so that both tiers of a pool take from one.
    """

    torch_device: torch.device
    is_asynchronous: bool
    shares_host_memory: bool

    def upload(self, columns: Sequence[NDArray[Any]]) -> list[Tensor]:
        """A tensor of each column's shape and dtype on the device, by one copy that the host does not wait for.

        On a CPU the tensors share the columns' memory. On any device the columns may be dropped, but on a CPU not be
        changed, when this returns.
        """
        ...

    def download(self, values: Tensor) -> Download:
        """Has values copied to the host, behind all that is in the queue."""
        ...

    def synchronize(self) -> None:
        """Waits until the queue is empty. Raises what the device says where it failed."""
        ...

    def reserve(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that lives as long as the worker. On a CPU it takes no memory before it is written."""
        ...

    def populate(self, reserved: Tensor) -> bool:
        """Has memory put behind a part of a reserved tensor ahead of the first write, which would wait for it. Returns
        whether there was anything to do, and it was done."""
        ...

    def lock(self, host: Tensor) -> None:
        """Locks memory of the host for as long as it lives, so that the device can copy from and to it by itself;
        nothing where it need not.

        Raises ConfigError where it cannot be locked.
        """
        ...

    def free_memory(self) -> int:
        """Bytes that may still be taken on the device."""
        ...

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Does work and returns the bytes that it held at most, beyond what was held before; 0 where memory is not
        reserved."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        """Does work once and records it. It must not wait for the device, and read and write the same memory each
        time. Graphs share the memory of what they compute in between, so only one runs at a time."""
        ...
