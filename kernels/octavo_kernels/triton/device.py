"""What the kernels' launch choices depend on: the one place that asks which GPU this is."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

# What a program can have on every GPU from compute capability 8.0 on, and on those of 9.0 and 10.0. Those of 8.0 and
# 8.7 have 163 KiB, but no use for it: compiled for them, larger tiles of attention spill registers before they fill 99.
SMALL_SHARED_MEMORY, LARGE_SHARED_MEMORY = 99 << 10, 227 << 10


@dataclass(frozen=True)
class DeviceTraits:
    """A device as the kernels see it.

    num_sms: streaming multiprocessors; shared_memory: bytes that a program can have, at least; native_float8: whether
    the compiler converts e4m3 in hardware (compute capability 8.9 and up); interpreted: whether kernels run in
    Triton's interpreter, on the CPU
    """

    num_sms: int
    shared_memory: int
    native_float8: bool
    interpreted: bool


@functools.cache
def device_traits(device: torch.device) -> DeviceTraits:
    """The traits of a CUDA device, or of the interpreter for a CPU."""
    if device.type == "cpu":
        interpreted = bool(triton.knobs.runtime.interpret)
        return DeviceTraits(num_sms=2, shared_memory=SMALL_SHARED_MEMORY, native_float8=False, interpreted=interpreted)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return DeviceTraits(
        num_sms=properties.multi_processor_count,
        shared_memory=LARGE_SHARED_MEMORY if properties.major in (9, 10) else SMALL_SHARED_MEMORY,
        native_float8=capability >= (8, 9),
        interpreted=False,
    )
