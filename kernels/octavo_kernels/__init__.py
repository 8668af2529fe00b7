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

_BACKENDS = ("cpu", "reference")
_log = logging.getLogger(__name__)


def available_backends() -> dict[str, str | None]:
    """Every backend's name, with None where it runs on this machine and otherwise the reason why it does not."""
    from octavo_kernels.cpu.library import why_unavailable

    return {"cpu": why_unavailable(), "reference": None}


def load_backend(name: str = "auto", *, device: torch.device | str = "cpu", num_threads: int | None = None) -> Backend:
    """Creates the named backend.

    name: "cpu" (native, CPU only), "reference" (plain torch, any device), or "auto": the native one where it runs and
    otherwise the reference, with a warning in the log that says why. num_threads: threads of the native backend; None
    means the physical cores that this process may use.

    Raises BackendUnavailableError for an unknown name, or for a backend asked for by name that cannot run here.
    """
    device = torch.device(device)
    if name not in ("auto", *_BACKENDS):
        raise BackendUnavailableError(f"unknown backend {name!r}; choose one of auto, {', '.join(_BACKENDS)}")
    if name != "reference":
        if device.type == "cpu":
            reason = available_backends()["cpu"]
        else:
            reason = f"it computes on the CPU and the device is {device}"
        if reason is None:
            from octavo_kernels.cpu.backend import CpuBackend

            return CpuBackend(num_threads=num_threads)
        if name == "cpu":
            raise BackendUnavailableError(f"the cpu backend cannot be used: {reason}")
        _log.warning("using the slower reference backend: the cpu backend cannot be used: %s", reason)
    from octavo_kernels.reference import ReferenceBackend

    return ReferenceBackend(device)
