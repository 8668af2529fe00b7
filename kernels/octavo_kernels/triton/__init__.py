"""GPU kernels in Triton, one op a file, and the backend made of them. Triton is imported with the first of them."""

from __future__ import annotations

import torch


def why_unavailable(device: torch.device) -> str | None:
    """Why these kernels cannot run on a device, or None."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed: pip install triton"
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        from octavo_kernels.triton.launcher import why_not_launchable

        return why_not_launchable()
    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"it computes on CUDA devices and the device is {device}"
