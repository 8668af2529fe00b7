"""Kernels of Octavo behind one interface: choosing a backend.

`load_backend` picks a backend by name, once, at start; which one, and why, is never silent. The ops themselves are
described in `backend`; this package knows nothing of sequences, plans or workers.
"""

from __future__ import annotations

import logging

import torch

from octavo_kernels.backend import AttentionBatch, Backend, DecoderLayer, DecoderShape, KVLayout, LayerKV, Linear
from octavo_kernels.errors import BackendUnavailableError, InvalidArgumentError, KernelError
from octavo_kernels.int4 import Int4Weight

__all__ = [
    "AttentionBatch",
    "Backend",
    "BackendUnavailableError",
    "DecoderLayer",
    "DecoderShape",
    "Int4Weight",
    "InvalidArgumentError",
    "KVLayout",
    "KernelError",
    "LayerKV",
    "Linear",
    "available_backends",
    "load_backend",
]

_BACKENDS = ("cpu", "triton", "reference")
_log = logging.getLogger(__name__)


def available_backends() -> dict[str, str | None]:
    """Every backend's name, with None where it runs on this machine and otherwise the reason why it does not."""
    devices = {"cpu": "cpu", "triton": "cuda", "reference": "cpu"}
    return {name: _why_unavailable(name, torch.device(device)) for name, device in devices.items()}


def load_backend(name: str = "auto", *, device: torch.device | str = "cpu", num_threads: int | None = None) -> Backend:
    """Creates the named backend.

    name: "cpu" (native, CPU only), "triton" (CUDA; the CPU where Triton interprets, for tests), "reference" (plain
    torch, any device), or "auto": the one that was made for the device where it runs and otherwise the reference, with
    a warning in the log that says why. num_threads: threads of the native backend; None means the physical cores that
    this process may use.

    Raises BackendUnavailableError for an unknown name, or for a backend asked for by name that cannot run here.
    """
    device = torch.device(device)
    if name not in ("auto", *_BACKENDS):
        raise BackendUnavailableError(f"unknown backend {name!r}; choose one of auto, {', '.join(_BACKENDS)}")
    wanted = name if name != "auto" else "cpu" if device.type == "cpu" else "triton"
    reason = _why_unavailable(wanted, device)
    if reason is not None:
        if name != "auto":
            raise BackendUnavailableError(f"the {name} backend cannot be used: {reason}")
        _log.warning("using the slower reference backend: the %s backend cannot be used: %s", wanted, reason)
        wanted = "reference"
    if wanted == "cpu":
        from octavo_kernels.cpu.backend import CpuBackend

        return CpuBackend(num_threads=num_threads)
    if wanted == "triton":
        from octavo_kernels.triton.backend import TritonBackend

        return TritonBackend(device)
    from octavo_kernels.reference import ReferenceBackend

    return ReferenceBackend(device)


def _why_unavailable(name: str, device: torch.device) -> str | None:
    """Why the named backend cannot compute on a device of this machine, or None."""
    if name == "cpu":
        from octavo_kernels.cpu.library import why_unavailable

        return why_unavailable() if device.type == "cpu" else f"it computes on the CPU and the device is {device}"
    if name == "triton":
        from octavo_kernels.triton import why_unavailable as why_triton_unavailable

        return why_triton_unavailable(device)
    return None
