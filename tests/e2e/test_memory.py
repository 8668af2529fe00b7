"""KV memory: requests beyond the pool all end, blocks are taken as tokens come, and every block comes back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.v1 import inference_pb2
from tests.e2e.harness import FINISH_REASONS, Server, request_of, running

NUM_BLOCKS = 100
NUM_REQUESTS = 40
BLOCK_SIZE = 16
# Tokens of a sequence that its reader has not seen: two plans in flight, and one sampled but not yet delivered.
UNSEEN_TOKENS = 3


class Reader(threading.Thread):
    """Sends a request and counts what comes back."""

    def __init__(self, server: Server, prompt: list[int], num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.prompt, self.num_tokens = prompt, num_tokens
        self.received = 0
        self.finish_reason = ""
        self.error: Exception | None = None
        self._call = server.start(request_of(prompt, max_tokens=num_tokens))

    def run(self) -> None:
        try:
            for response in self._call:
                self._count(response)
        except Exception as error:
            self.error = error

    def _count(self, response: inference_pb2.GenerateResponse) -> None:
        for delta in response.deltas:
            self.received += len(delta.token_ids)
            if delta.finish_reason:
                self.finish_reason = FINISH_REASONS[delta.finish_reason]

    def most_blocks(self) -> int:
        """Blocks that hold this sequence's tokens when less than one block of it is wasted."""
        held = min(self.received + UNSEEN_TOKENS, self.num_tokens)
        return -(-(len(self.prompt) + held) // BLOCK_SIZE)


@pytest.fixture(params=["llama-linear-bias", pytest.param("default", marks=pytest.mark.full)], scope="module")
def small_server(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Iterator[Server]:
    model = {} if request.param == "default" else {"model": str(tiny_models[request.param])}
    with running(num_device_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **model) as server:
        yield server


def mixed_requests() -> list[tuple[list[int], int]]:
    """Prompts of 1 to 300 tokens with 1 to 150 tokens to generate: three times what the pool holds."""
    rng = random.Random(7)
    return [
        ([rng.randrange(3, 384) for _ in range(rng.choice((1, 5, 40, 150, 300)))], rng.choice((1, 20, 80, 150)))
        for _ in range(NUM_REQUESTS)
    ]


def test_every_request_ends_and_waste_stays_below_one_block(small_server: Server) -> None:
    readers = [Reader(small_server, prompt, num_tokens) for prompt, num_tokens in mixed_requests()]
    needed = sum(len(reader.prompt) + reader.num_tokens for reader in readers)
    assert needed > 3 * NUM_BLOCKS * BLOCK_SIZE
    for reader in readers:
        reader.start()
    most_used = 0
    while any(reader.is_alive() for reader in readers):
        running_before = [reader for reader in readers if reader.is_alive()]
        state = small_server.state()
        (worker,) = state.workers
        assert worker.device_pool.block_count == NUM_BLOCKS
        used = worker.device_pool.used_block_count
        # Further calls are answered behind the tokens that the first one counted; the readers see those at last.
        for _ in range(5):
            small_server.state()
            allowed = sum(reader.most_blocks() for reader in running_before)
            if used <= allowed:
                break
        assert used <= min(allowed, NUM_BLOCKS)
        most_used = max(most_used, used)
    for reader in readers:
        assert reader.error is None
        assert (reader.received, reader.finish_reason) == (reader.num_tokens, "length")
    assert most_used > NUM_BLOCKS // 2, "the pool was never under pressure"
    small_server.wait_idle()


def test_tokens_do_not_depend_on_pressure(small_server: Server) -> None:
    """Alone, and among more requests than fit."""
    chosen = mixed_requests()[:20]
    alone = [small_server.generate(prompt, max_tokens=num_tokens).token_ids for prompt, num_tokens in chosen[:6]]
    calls = [small_server.start(request_of(prompt, max_tokens=num_tokens)) for prompt, num_tokens in chosen]
    among = [[token for r in call for d in r.deltas for token in d.token_ids] for call in calls]
    assert among[:6] == alone
    small_server.wait_idle()


def test_a_lone_sequence_holds_the_blocks_of_its_tokens(small_server: Server) -> None:
    reader = Reader(small_server, [5] * 33, 120)
    reader.start()
    used: list[int] = []
    while reader.is_alive():
        used.append(small_server.used_blocks())
        small_server.state()  # Answered behind the tokens that the first call counted.
        assert used[-1] <= reader.most_blocks()
    reader.join(60)
    assert reader.error is None
    assert len(set(used)) > 2, "blocks were taken at once, not as tokens came"
    small_server.wait_idle()
