"""How many connections each front end takes, so that neither runs out of open files, which the worker's needs too."""

from __future__ import annotations

import resource
from dataclasses import dataclass

_MOST_FILES = 1 << 16
_FEWEST_CONNECTIONS = 16


@dataclass(frozen=True)
class ConnectionLimits:
    """Most connections at a time: of HTTP, which has one for each request under way, and of gRPC, where many share
    one.
    """

    http: int
    grpc: int

    @classmethod
    def of(cls, max_connections: int) -> ConnectionLimits:
        """max_connections: for each of the two; 0 divides what the limit on open files leaves room for."""
        if max_connections:
            return cls(max_connections, max_connections)
        files = _raised_file_limit()
        return cls(max(files * 3 // 4, _FEWEST_CONNECTIONS), max(files // 8, _FEWEST_CONNECTIONS))


def _raised_file_limit() -> int:
    """The limit on open files, once it is as high as this process may set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
