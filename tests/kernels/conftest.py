"""The backends under test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo_kernels.cpu.backend import CpuBackend
from octavo_kernels.cpu.library import supported_isas, why_unavailable
from octavo_kernels.reference import ReferenceBackend


@pytest.fixture
def reference() -> ReferenceBackend:
    return ReferenceBackend()


@pytest.fixture(scope="session")
def native() -> Callable[..., CpuBackend]:
    """Makes native backends, each kind once; skips what this machine cannot run."""
    made: dict[tuple[str | None, int], CpuBackend] = {}

    def make(isa: str | None = None, num_threads: int = 2) -> CpuBackend:
        reason = why_unavailable()
        if reason is not None:
            pytest.skip(reason)
        if isa is not None and isa not in supported_isas():
            pytest.skip(f"this machine does not run {isa}")
        key = (isa, num_threads)
        if key not in made:
            made[key] = CpuBackend(isa=isa, num_threads=num_threads)
        return made[key]

    return make
