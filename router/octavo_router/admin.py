"""AdminService: shows operators what the engine holds, begins its drain, and flushes the prefix cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import grpc.aio

from octavo.errors import OctavoError
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo_router import grpc_errors

if TYPE_CHECKING:
    from octavo_router.backend import Backend
    from octavo_router.engine import Engine

Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService over the engine. UNAVAILABLE until there is one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def GetState(self, request: admin_pb2.GetStateRequest, context: Context) -> admin_pb2.GetStateResponse:
        return (await self._engine(context)).state()

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        engine = await self._engine(context)
        logger.info("%s asks to drain", context.peer())
        return admin_pb2.DrainResponse(request_count=engine.begin_drain())

    async def FlushPrefixCache(
        self, request: admin_pb2.FlushPrefixCacheRequest, context: Context
    ) -> admin_pb2.FlushPrefixCacheResponse:
        num_blocks = (await self._engine(context)).flush_prefix_cache()
        logger.info("%s flushed the prefix cache: %d blocks are free again", context.peer(), num_blocks)
        return admin_pb2.FlushPrefixCacheResponse(block_count=num_blocks)

    async def _engine(self, context: Context) -> Engine:
        try:
            return self._backend.engine
        except OctavoError as error:
            await grpc_errors.abort(context, error)
