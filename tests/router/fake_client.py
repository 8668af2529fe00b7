"""A worker client without a wire: sessions with `FakeWorker`s, which can be held, killed, hung and replaced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octavo.worker.v1 import worker_pb2 as pb
from octavo_router.plan import StepPlan, StepResult
from octavo_router.tokenizer import Tokenizer
from octavo_router.worker_client import Progress, SessionLostError, TokenizerFiles, WorkerUnavailableError
from tests.router.fake_worker import EOS_TOKEN_ID, FakeWorker

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


@cache
def letter_tokenizer() -> Tokenizer:
    """Each of the fake model's 64 tokens is a letter, but for the end-of-sequence token."""
    vocab = {letter: token_id for token_id, letter in enumerate(LETTERS) if token_id != EOS_TOKEN_ID}
    backend = Backend(models.BPE(vocab | {"<eos>": EOS_TOKEN_ID}, []))
    backend.decoder = decoders.ByteLevel()
    description = json.loads(backend.to_str())
    return Tokenizer(
        json.dumps(description).encode(), special_tokens={"eos_token": "<eos>"}, eos_token_ids=[EOS_TOKEN_ID]
    )


def text_of(token_ids: list[int]) -> str:
    """What the letters of tokens spell, without end-of-sequence tokens."""
    return "".join(LETTERS[token_id] for token_id in token_ids if token_id != EOS_TOKEN_ID)


def description(*, block_size: int = 4, num_blocks: int = 200, max_model_len: int = 4096) -> pb.DescribeResponse:
    """A worker that takes two plans and gives a lease of half a second."""
    return pb.DescribeResponse(
        protocol_version=1,
        worker_name="worker-0",
        incarnation=77,
        model=pb.ModelInfo(
            name="fake", digest="digest-1", tokenizer_digest="tokens-1", vocab_size=64, max_model_len=max_model_len
        ),
        kv_memory=pb.KvMemoryInfo(block_size=block_size, device_block_count=num_blocks),
        max_plans_in_flight=2,
        lease_ms=500,
    )


class FakeClient:
    """One worker at a time.

    answering: cleared, plans stay unanswered; up: whether describe answers; before_answer: called with each plan before
    it is executed; alter: what becomes of a result on its way.
    """

    address = "fake:1"

    def __init__(self, described: pb.DescribeResponse | None = None) -> None:
        self.described = described or description()
        self.up = True
        self.answering = asyncio.Event()
        self.answering.set()
        self.before_answer: Callable[[StepPlan], None] = lambda plan: None
        self.alter: Callable[[StepResult], StepResult] = lambda result: result
        self.plans: list[StepPlan] = []
        self.sent = asyncio.Event()
        self.renewed = asyncio.Event()
        self.worker = FakeWorker(block_size=1, num_blocks=0)
        self.session: FakeSession | None = None
        self.closed = False

    async def describe(self) -> pb.DescribeResponse:
        if not self.up:
            raise WorkerUnavailableError("the fake worker is down")
        described = pb.DescribeResponse()
        described.CopyFrom(self.described)
        return described

    async def get_tokenizer(self) -> TokenizerFiles:
        raise NotImplementedError("tests bring their own tokenizer")

    @asynccontextmanager
    async def open_session(self, *, epoch: int, incarnation: int, router_name: str) -> AsyncGenerator[FakeSession]:
        if not self.up or incarnation != self.described.incarnation:
            raise SessionLostError("the fake worker is down")
        assert epoch > self.described.last_epoch
        self.described.last_epoch = epoch
        memory = self.described.kv_memory
        self.worker = FakeWorker(block_size=memory.block_size, num_blocks=memory.device_block_count)
        self.session = FakeSession(self, self.worker)
        yield self.session

    async def close(self) -> None:
        self.closed = True

    def kill(self, *, restart: bool = True) -> None:
        """The worker's process dies; another one, with another incarnation, is there at once or not."""
        assert self.session is not None
        self.described.incarnation += 1
        self.described.last_epoch = 0
        self.up = restart
        self.session.lose()


class FakeSession:
    """Answers plans in order, each in a turn of the event loop of its own."""

    def __init__(self, client: FakeClient, worker: FakeWorker) -> None:
        self._client = client
        self._worker = worker
        self._inbox: asyncio.Queue[StepPlan | None] = asyncio.Queue()
        self._lost = False
        self.progress: asyncio.Queue[Progress] = asyncio.Queue()

    def lose(self) -> None:
        self._lost = True
        self._inbox.put_nowait(None)

    async def send(self, plan: StepPlan) -> None:
        if self._lost:
            raise SessionLostError("the fake session was killed")
        self._client.plans.append(plan)
        self._client.sent.set()
        self._inbox.put_nowait(plan)
        await asyncio.sleep(0)

    async def renew(self) -> None:
        self._client.renewed.set()

    async def messages(self) -> AsyncGenerator[StepResult | Progress]:
        while True:
            plan = await self._inbox.get()
            if plan is not None and not self._lost:
                answering = asyncio.ensure_future(self._client.answering.wait())
                while not answering.done():
                    progress = asyncio.ensure_future(self.progress.get())
                    await asyncio.wait({answering, progress}, return_when=asyncio.FIRST_COMPLETED)
                    if progress.done():
                        yield progress.result()
                    progress.cancel()
            if plan is None or self._lost:
                raise SessionLostError("the fake session was killed")
            self._client.before_answer(plan)
            yield self._client.alter(self._worker.execute(plan))
