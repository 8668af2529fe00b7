from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from octavo_router.connections import ConnectionLimits


@pytest.fixture
def low_limit() -> Iterator[int]:
    """The soft limit on open files is 512 for the length of a test; gives the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_given_limit_holds_for_each() -> None:
    assert ConnectionLimits.of(5) == ConnectionLimits(http=5, grpc=5)


def test_the_limit_on_files_is_raised_and_divided(low_limit: int) -> None:
    limits = ConnectionLimits.of(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == low_limit
    assert soft == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))
    assert limits == ConnectionLimits(http=soft * 3 // 4, grpc=soft // 8)
