"""Devices: how the host gives them work, gets answers, and lets work be repeated. The only place that knows CUDA.

`base` says what a device can do; `cpu` and `cuda` do it. Tensors and ops are torch's and the kernels'; which settings
name which device is `octavo_worker.device`'s.
"""

from __future__ import annotations

import torch

from octavo_worker.devices.base import Device, Download, Graph
from octavo_worker.devices.cpu import CpuDevice

__all__ = ["CpuDevice", "Device", "Download", "Graph", "open_device"]


def open_device(device: torch.device) -> Device:
    """What to work with a device of torch's by."""
    if device.type == "cuda":
        from octavo_worker.devices.cuda import CudaDevice

        return CudaDevice(device)
    return CpuDevice(device)
