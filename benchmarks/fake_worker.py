"""A worker that answers at once: it speaks octavo.worker.v1, computes nothing and samples words of four letters.

It notes when it gave each token, and how long it waited from an answer to the plan that follows, which is all that the
router's benchmark wants of it. It keeps no rules; the tests' fake workers do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import string
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc.aio
import tokenizers

from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc

LETTERS_PER_TOKEN = 4
_NUM_WORDS = 4096
_BLOCK_SIZE = 16
_NUM_BLOCKS = 1 << 16
_MAX_MODEL_LEN = 1 << 14
_PLANS_IN_FLIGHT = 2
_GATHERING_STEP_S = 0.05


class Wait(NamedTuple):
    """Seconds from an answer to the plan that became possible with it, and how many sequences that plan has."""

    seconds: float
    num_sequences: int


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Serves on `address` from start to stop, in the running event loop. Answers by time.perf_counter's clock.

    given_at: when each prompt's tokens were given, by the prompt's first `KEY_LENGTH` tokens.
    """

    KEY_LENGTH = 2

    def __init__(self, address: str) -> None:
        self._vocabulary = _vocabulary()
        self._words = [token_id for token, token_id in self._vocabulary.items() if len(token) == LETTERS_PER_TOKEN]
        self._step_s = 0.0
        self._num_gathering = 0
        self.given_at: dict[tuple[int, ...], list[float]] = {}
        self.waits: list[Wait] = []
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)

    async def start(self) -> None:
        """Begins to serve."""
        await self._server.start()

    async def stop(self) -> None:
        """Ends every session."""
        await self._server.stop(0)

    def begin(self, num_sequences: int, *, step_s: float) -> None:
        """Forgets what it noted. Steps are slow until so many new sequences are there, so that they start together;
        then each takes step_s.
        """
        self._num_gathering, self._step_s = num_sequences, step_s
        self.given_at, self.waits = {}, []

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids that prompts can be made of."""
        return self._words

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            protocol_version=1,
            worker_name="fake-worker",
            incarnation=1,
            model=pb.ModelInfo(
                name="fake",
                digest="fake",
                tokenizer_digest="fake",
                vocab_size=len(self._vocabulary),
                max_model_len=_MAX_MODEL_LEN,
                dtype="float32",
            ),
            kv_memory=pb.KvMemoryInfo(block_size=_BLOCK_SIZE, device_block_count=_NUM_BLOCKS),
            max_plans_in_flight=_PLANS_IN_FLIGHT,
            lease_ms=60_000,
        )

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        yield pb.GetTokenizerResponse(defaults=pb.TokenizerDefaults())
        yield pb.GetTokenizerResponse(tokenizer_json=_tokenizer_json(self._vocabulary))

    async def Run(self, requests: AsyncIterator[pb.RunRequest], context: Any) -> AsyncIterator[pb.RunResponse]:
        opening = await anext(requests)
        yield pb.RunResponse(epoch=opening.epoch, incarnation=opening.incarnation, opened=pb.SessionOpened())
        plans: asyncio.Queue[tuple[float, pb.RunRequest]] = asyncio.Queue()
        answered_at: dict[int, float] = {}

        async def take_plans() -> None:
            async for request in requests:
                if not request.HasField("plan"):
                    continue
                now = time.perf_counter()
                plans.put_nowait((now, request))
                # The plan could not come before this answer: as many as may be in flight were.
                if (before := answered_at.pop(request.step_seq - _PLANS_IN_FLIGHT, None)) is not None:
                    self.waits.append(Wait(now - before, len(request.plan.scheduled.sequence_ids)))

        taking = asyncio.create_task(take_plans())
        try:
            notes: dict[int, list[float]] = {}
            done_at = 0.0
            while True:
                arrived_at, request = await plans.get()
                self._num_gathering -= len(request.plan.new_sequences)
                step_s = self._step_s if self._num_gathering <= 0 else _GATHERING_STEP_S
                wait_s = max(arrived_at, done_at) + step_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                response = self._answer(request, notes)
                done_at = answered_at[request.step_seq] = time.perf_counter()
                yield response
        finally:
            taking.cancel()

    def _answer(self, request: pb.RunRequest, notes: dict[int, list[float]]) -> pb.RunResponse:
        for new in request.plan.new_sequences:
            notes[new.sequence_id] = self.given_at.setdefault(tuple(new.token_ids[: self.KEY_LENGTH]), [])
        for sequence_id in request.plan.release_sequence_ids:
            notes.pop(sequence_id, None)
        scheduled = request.plan.scheduled
        sampled = list(itertools.compress(scheduled.sequence_ids, scheduled.samples))
        first = request.step_seq % _NUM_WORDS
        words = itertools.islice(itertools.cycle(self._words), first, first + len(sampled))
        now = time.perf_counter()
        for sequence_id in sampled:
            notes[sequence_id].append(now)
        return pb.RunResponse(
            epoch=request.epoch,
            incarnation=request.incarnation,
            step_seq=request.step_seq,
            result=pb.StepResult(sequence_ids=sampled, token_ids=words, duration_us=100),
        )


def _vocabulary() -> dict[str, int]:
    """The 256 bytes and words of four letters, each of them a token."""
    tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=LETTERS_PER_TOKEN))
    tokens += itertools.islice(words, 0, 26**LETTERS_PER_TOKEN, 26**LETTERS_PER_TOKEN // _NUM_WORDS)
    return {token: token_id for token_id, token in enumerate(tokens[: 256 + _NUM_WORDS])}


def _tokenizer_json(vocabulary: dict[str, int]) -> bytes:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return json.dumps(json.loads(tokenizer.to_str())).encode()
