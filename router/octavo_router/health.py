"""grpc.health.v1 of the router: one status a service, watched by any number of clients.

The health package's own servicer for asyncio drops all watchers of a service when one of them leaves; this one does
not, and lets watchers go when the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_Status = health_pb2.HealthCheckResponse

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Health of the named services; the empty name stands for the whole server. All start as NOT_SERVING."""

    def __init__(self, services: Sequence[str]) -> None:
        self._serving = {service: False for service in services}
        self._changed = asyncio.Condition()
        self._closed = False

    async def set_serving(self, service: str, serving: bool) -> None:
        """Sets a service's status and tells its watchers."""
        async with self._changed:
            self._serving[service] = serving
            self._changed.notify_all()

    async def close(self) -> None:
        """Ends every Watch, so that none keeps a server from stopping."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def Check(self, request: Any, context: Context) -> Any:
        if request.service not in self._serving:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service[:200]!r} here; known: {', '.join(filter(None, self._serving))}",
            )
        return _Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> None:
        last = None
        while True:
            async with self._changed:
                # Statuses that came and went while the last one was written are not told.
                while not self._closed and self._status(request.service) == last:
                    await self._changed.wait()
                if self._closed:
                    return
                last = self._status(request.service)
            await context.write(_Status(status=last))

    def _status(self, service: str) -> Any:
        if service not in self._serving:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._serving[service] else _Status.NOT_SERVING
