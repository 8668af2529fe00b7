"""Random and mutated GenerateRequests against a real pair: wrong ones are the caller's error, and nothing stays behind.

Messages are made by walking the contract's descriptors, so that a new field is fuzzed without being named here; some
are then broken byte by byte. A seed makes a run repeatable: a failure names the seed and the message.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from octavo.channel import channel_options
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import sampling_pb2
from tests.e2e.harness import Server

GENERATE = "/octavo.v1.InferenceService/Generate"
CONCURRENCY = 32
CALL_TIMEOUT_S = 120.0
# What a caller's mistake, a full queue, a deadline or a cancellation may end with; anything else is a fault of ours.
FAIR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}
TEXTS = ("", "x", "Hello", "<|im_end|>", "\x00", "{", '{"type": "object"}', "[a-z]+", "é" * 3, "\U0001f600", "a" * 300)
JSON_SCHEMAS = (
    '{"type": "object"}',
    '{"type": "string", "maxLength": 3}',
    '{"enum": [1, "a", null]}',
    '{"type": "array", "items": {"$ref": "#"}}',
    '{"type": "nothing"}',
    "{",
)
FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-12, 1e30, float("nan"), float("inf"), -float("inf"))
INTEGERS = (0, 1, 2, 3, 5, 20, 64, 95, 96, 500, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -2, -(2**31), -(2**63))
BITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


class Fuzzer:
    """Makes requests for a model of this digest. Two of one seed make the same."""

    def __init__(self, seed: int, digest: str) -> None:
        self._random = random.Random(seed)
        self._digest = digest

    def data(self) -> bytes:
        """A serialized request: a plausible one with a few fields changed, one made up throughout, or a broken one."""
        request, kind = pb.GenerateRequest(), self._random.random()
        if kind < 0.3:
            self._fill(request, share=0.25)
        else:
            self._make_plausible(request)
            for _ in range(self._random.randrange(4)):
                self._change(request)
        data = request.SerializeToString()
        return self._broken(data) if kind > 0.75 else data

    def _make_plausible(self, request: pb.GenerateRequest) -> None:
        match self._random.randrange(3):
            case 0:
                request.text = self._random.choice(TEXTS)
            case 1:
                request.token_ids.ids.extend(self._random.randrange(96) for _ in range(self._random.randrange(1, 20)))
                if self._random.random() < 0.3:
                    self._go_on(request)
            case _:
                request.chat.messages.add(role="user", content=self._random.choice(TEXTS))
        request.stop.max_tokens = self._random.choice((1, 3, 8, 20))
        request.sampling.temperature = self._random.choice((0, 0.7, 1))

    def _go_on(self, request: pb.GenerateRequest) -> None:
        """Makes a request one that goes on behind what its caller holds, which may be nothing the model ever said."""
        resume = request.resume
        resume.prompt_token_ids.extend(request.token_ids.ids)
        resume.model_digest, resume.seed = self._digest, 7
        sample = resume.samples.add(text_byte_count=self._random.randrange(4))
        sample.token_ids.extend(self._random.randrange(96) for _ in range(self._random.randrange(3)))

    def _change(self, message: Message) -> None:
        """Sets one field, somewhere within the message."""
        descriptor: Descriptor = message.DESCRIPTOR
        field = self._random.choice(list(descriptor.fields))
        if _is_ours(field) and not field.is_repeated and self._random.random() < 0.8:
            self._change(getattr(message, field.name))
        else:
            self._set(message, field, share=0.4)

    def _fill(self, message: Message, share: float) -> None:
        """Sets this share of the fields."""
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < share:
                self._set(message, field, share)

    def _set(self, message: Any, field: FieldDescriptor, share: float) -> None:
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            keys, values = kind.fields
            for _ in range(self._random.randrange(4)):
                getattr(message, field.name)[self._scalar(keys)] = self._scalar(values)
        elif kind is not None and not _is_ours(field):
            # A Struct, the only message of others.
            getattr(message, field.name).update({"key": self._random.choice(TEXTS)})
        elif kind is not None:
            targets = getattr(message, field.name)
            for _ in range(self._random.randrange(1, 4) if field.is_repeated else 1):
                target = targets.add() if field.is_repeated else targets
                target.SetInParent()
                self._fill(target, min(0.9, share + 0.1))
        elif field.is_repeated:
            values = [self._scalar(field) for _ in range(self._random.choice((0, 1, 2, 5, 20)))]
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        if field.type in BITS:
            low, high = BITS[field.type]
            return self._random.choice([value for value in INTEGERS if low <= value <= high])
        match field.type:
            case FieldDescriptor.TYPE_BOOL:
                return self._random.random() < 0.5
            case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
                return self._random.choice(FLOATS)
            case FieldDescriptor.TYPE_ENUM:
                return self._random.choice([*range(6), 99])
            case FieldDescriptor.TYPE_BYTES:
                return self._random.randbytes(8)
        return self._random.choice(JSON_SCHEMAS if field.name.startswith(("json_schema", "parameters")) else TEXTS)

    def _broken(self, data: bytes) -> bytes:
        """The same with bytes flipped, cut, doubled or put in."""
        broken = bytearray(data)
        for _ in range(self._random.randrange(1, 5)):
            at = self._random.randrange(len(broken) + 1)
            match self._random.randrange(4):
                case 0 if at < len(broken):
                    broken[at] ^= 1 << self._random.randrange(8)
                case 1:
                    del broken[at:]
                case 2:
                    broken[at:at] = broken[at : at + 8]
                case _:
                    broken[at:at] = struct.pack("<I", self._random.getrandbits(32))[: self._random.randrange(1, 5)]
        return bytes(broken)


def _is_ours(field: FieldDescriptor) -> bool:
    """Whether a field is a message of the contract's own."""
    return field.message_type is not None and field.message_type.full_name.startswith("octavo.")


async def outcomes(server: Server, num_requests: int, seed: int) -> Counter[grpc.StatusCode]:
    """Sends requests, cancels some, and counts how they end. AssertionError names what ended unfairly."""
    (model,) = server.inference.ListModels(pb.ListModelsRequest()).models
    fuzzer = Fuzzer(seed, model.digest)
    messages = [fuzzer.data() for _ in range(num_requests)]
    counts: Counter[grpc.StatusCode] = Counter()
    async with grpc.aio.insecure_channel(server.grpc_address, options=channel_options(server.grpc_address)) as channel:
        method = channel.unary_stream(
            GENERATE, request_serializer=None, response_deserializer=pb.GenerateResponse.FromString
        )
        gate = asyncio.Semaphore(CONCURRENCY)

        async def send(index: int, data: bytes) -> None:
            async with gate:
                call: Any = method(data, timeout=CALL_TIMEOUT_S)
                try:
                    async for _ in call:
                        if index % 7 == 0:
                            call.cancel()
                except (grpc.aio.AioRpcError, asyncio.CancelledError):
                    pass
                code = await call.code()
                counts[code] += 1
                assert code in FAIR, f"request {index} of seed {seed}: {code} {await call.details()}\n{data!r}"

        async with asyncio.TaskGroup() as group:
            for index, data in enumerate(messages):
                group.create_task(send(index, data))
    return counts


def check_well(server: Server) -> None:
    """The server has nothing left of what it was sent, and works."""
    server.wait_idle()
    assert server.generate("Hello", max_tokens=3).finish_reason == "length"
    server.wait_idle()
    assert not [line for line in server.log if "Traceback" in line]


async def test_a_few_hundred_requests(tiny_server: Server) -> None:
    counts = await outcomes(tiny_server, 400, seed=1)
    assert counts[grpc.StatusCode.OK] > 40
    assert counts[grpc.StatusCode.INVALID_ARGUMENT] > 40
    check_well(tiny_server)


@pytest.mark.full
async def test_five_thousand_requests(tiny_server: Server) -> None:
    counts = await outcomes(tiny_server, 5000, seed=2)
    assert counts[grpc.StatusCode.OK] > 500
    check_well(tiny_server)


def test_a_seed_makes_the_same_requests() -> None:
    first, second = Fuzzer(3, "d"), Fuzzer(3, "d")
    assert [first.data() for _ in range(50)] == [second.data() for _ in range(50)]
    fields = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    seen: set[str] = set()
    fuzzer = Fuzzer(4, "d")
    for _ in range(2000):
        request = pb.GenerateRequest()
        fuzzer._fill(request, 0.5)
        seen |= {field.name for field, _ in request.sampling.ListFields()}
    assert seen == fields
