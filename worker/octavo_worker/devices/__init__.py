"""Devices: how the host gives them work, gets answers, and lets work be repeated. The only place that knows CUDA.

`base` says what a device can do; `cpu` and `cuda` do it. Tensors and ops are torch's and the kernels'; the settings
that follow from a device are `octavo_worker.device`'s.
"""

from __future__ import annotations

import torch

from octavo.errors import ConfigError
from octavo_worker.devices.base import Device, Download, Graph
from octavo_worker.devices.cpu import CpuDevice

__all__ = ["CpuDevice", "Device", "Download", "Graph", "find_device", "open_device"]


def find_device(name: str) -> Device:
    """The device of `--device`, opened; "auto" takes CUDA where there is one. Raises ConfigError when it is not
    there."""
    has_cuda = name != "cpu" and torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    elif name == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but torch finds no CUDA device; use --device cpu")
    return open_device(torch.device(name))


def open_device(device: torch.device) -> Device:
    """What to work with a device of torch's by."""
    if device.type == "cuda":
        from octavo_worker.devices.cuda import CudaDevice

        return CudaDevice(device)
    return CpuDevice(device)
