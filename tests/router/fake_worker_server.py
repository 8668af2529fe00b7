"""A worker behind gRPC that spells the alphabet, a letter a step, for tests of the router as a program.

It keeps no memory and checks no rules; `fake_worker.py` does that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import tokenizers

from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class FakeWorkerServer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves on `address` between start and stop. Steps wait while `running` is not set."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.running = asyncio.Event()
        self.running.set()
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            protocol_version=1,
            worker_name="worker-0",
            incarnation=1,
            model=pb.ModelInfo(
                name="alphabet", digest="d1", tokenizer_digest="t1", vocab_size=256, max_model_len=512, dtype="float32"
            ),
            kv_memory=pb.KvMemoryInfo(block_size=16, device_block_count=64),
            max_plans_in_flight=1,
            lease_ms=10_000,
        )

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        yield pb.GetTokenizerResponse(defaults=pb.TokenizerDefaults(chat_template=CHAT_TEMPLATE))
        yield pb.GetTokenizerResponse(tokenizer_json=tokenizer_json())

    async def Run(self, requests: AsyncIterator[pb.RunRequest], context: Context) -> AsyncIterator[pb.RunResponse]:
        num_sampled: dict[int, int] = {}
        async for request in requests:
            response = pb.RunResponse(epoch=request.epoch, incarnation=request.incarnation, step_seq=request.step_seq)
            if request.HasField("open"):
                response.opened.SetInParent()
                yield response
            if request.HasField("plan"):
                await self.running.wait()
                response.result.duration_us = 100
                scheduled = request.plan.scheduled
                for sequence_id, samples in zip(scheduled.sequence_ids, scheduled.samples, strict=True):
                    if samples:
                        response.result.sequence_ids.append(sequence_id)
                        # In the order of ByteLevel's alphabet "!" is 0.
                        response.result.token_ids.append(ord("a") - ord("!") + num_sampled.get(sequence_id, 0) % 26)
                        num_sampled[sequence_id] = num_sampled.get(sequence_id, 0) + 1
                yield response


def tokenizer_json() -> bytes:
    """A tokenizer whose tokens are single bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return json.dumps(json.loads(tokenizer.to_str())).encode()
