"""AdminService: shows operators what the engine holds, begins its drain, and flushes the prefix cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import grpc.aio

from octavo.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from octavo_router.engine import Engine

Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService over the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GetState(self, request: admin_pb2.GetStateRequest, context: Context) -> admin_pb2.GetStateResponse:
        return self._engine.state()

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        logger.info("%s asks to drain", context.peer())
        return admin_pb2.DrainResponse(request_count=self._engine.begin_drain())

    async def FlushPrefixCache(
        self, request: admin_pb2.FlushPrefixCacheRequest, context: Context
    ) -> admin_pb2.FlushPrefixCacheResponse:
        num_blocks = self._engine.flush_prefix_cache()
        logger.info("%s flushed the prefix cache: %d blocks are free again", context.peer(), num_blocks)
        return admin_pb2.FlushPrefixCacheResponse(block_count=num_blocks)
