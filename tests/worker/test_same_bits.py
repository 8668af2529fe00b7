"""A sequence's tokens and log-probabilities have the same bits however its blocks came about, in fp32, int8 and int4,
and with K and V of 8 bits.

Alone in fresh blocks, or beside others: behind a cached prefix, as a sibling that shares a prompt, as a fork, swapped
out and in, recomputed. Every pool starts full of NaN, as blocks of sequences that failed leave them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import BackendUnavailableError, load_backend
from octavo_worker.executor import Executor
from octavo_worker.grammar import GrammarEngine
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import INSTALLED_MODELS, find_model
from tests.worker.cases import MODEL_CASES
from tests.worker.checkpoints import write_checkpoint
from tests.worker.conftest import load_decoder, make_executor, new_sequence, schedule

BLOCK = 16
TOPS = 3
# One token sampled says little, but the likeliest beside it say what greedy sampling would have taken as well.
SAMPLING = {"temperature": 1.3, "seed": 11, "top_p": 0.98, "return_logprobs": True, "top_logprob_count": TOPS}


@dataclass(frozen=True)
class Sampled:
    """A token with its log-probability and the likeliest (id, log-probability) beside it."""

    token_id: int
    logprob: float
    tops: tuple[tuple[int, float], ...]


@dataclass
class Harness:
    """An executor that hands out its blocks. prompt: longer than two blocks and not whole blocks."""

    executor: Executor
    prompt: list[int]
    next_block: int = 0

    @property
    def is_tiny(self) -> bool:
        """Whether the model is so small that a test may run it often."""
        return self.executor.decoder.num_parameters < 1_000_000

    def blocks(self, num_tokens: int) -> list[int]:
        """New blocks for so many tokens."""
        count = -(-num_tokens // BLOCK)
        self.next_block += count
        assert self.next_block <= self.executor.pool.size.num_device_blocks
        return list(range(self.next_block - count, self.next_block))

    def sequence(
        self, sequence_id: int, tokens: list[int], blocks: list[int], prompt_len: int | None = None, **params: Any
    ) -> pb.NewSequence:
        return new_sequence(sequence_id, tokens, blocks, prompt_len=prompt_len or len(tokens), **{**SAMPLING, **params})

    def execute(self, plan: pb.StepPlan) -> dict[int, Sampled]:
        """What the sequences sampled."""
        result = self.executor.execute(plan)
        assert not result.errors
        tops = list(zip(result.logprobs.top_token_ids, result.logprobs.top_logprobs, strict=True))
        return {
            sequence_id: Sampled(token_id, logprob, tuple(tops[TOPS * index : TOPS * (index + 1)]))
            for index, (sequence_id, token_id, logprob) in enumerate(
                zip(result.sequence_ids, result.token_ids, result.logprobs.logprobs, strict=True)
            )
        }

    def step(self, *entries: tuple[int, int, int, bool], **plan: Any) -> dict[int, Sampled]:
        """Executes a plan that computes these (sequence id, start, count, samples)."""
        return self.execute(pb.StepPlan(scheduled=schedule(*entries), **plan))

    def alone(self, prompt: list[int], count: int, **params: Any) -> list[Sampled]:
        """What a sequence samples that has the worker to itself. Its blocks are given back."""
        before = self.next_block
        sequence = self.sequence(1, prompt, self.blocks(len(prompt) + count), **params)
        out = [self.step((1, 0, len(prompt), True), new_sequences=[sequence])[1]]
        while len(out) < count:
            out.append(self.step((1, len(prompt) + len(out) - 1, 1, True))[1])
        self.execute(pb.StepPlan(release_sequence_ids=[1]))
        self.next_block = before
        self.spoil()
        return out

    def spoil(self) -> None:
        """Leaves NaN in all blocks that were not handed out."""
        pool = self.executor.pool
        pool.device[self.next_block :] = 0xFF if pool.layout.is_quantized else float("nan")  # scales of NaN


def token_ids(sampled: list[Sampled]) -> list[int]:
    return [item.token_id for item in sampled]


@pytest.fixture(
    scope="module",
    params=["llama", "llama-int4", "mistral-window", "mistral-window-kv8", "default", "default-int8-kv8"],
)
def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, letters: GrammarEngine
) -> Executor:
    """Over kernels that are row-invariant."""
    try:
        backend = load_backend("cpu")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert backend.row_invariant
    name = request.param.removesuffix("-kv8")
    kv_dtype = torch.int8 if request.param.endswith("-kv8") else None
    is_default = name.startswith("default")
    if is_default:
        path: Path = find_model(next(iter(INSTALLED_MODELS))).path
    else:
        path = write_checkpoint(tmp_path_factory.mktemp("tiny"), MODEL_CASES[name.removesuffix("-int4")])
    checkpoint = open_checkpoint(find_model(str(path)))
    grammars = GrammarEngine(checkpoint.tokenizer) if is_default else letters
    is_int8 = name == "default-int8"
    dtype, quantization = (torch.bfloat16, "int8") if is_int8 else (torch.float32, "none")
    if name.endswith("-int4"):
        quantization = "int4"
    decoder = load_decoder(checkpoint, backend, dtype, quantization)
    return make_executor(
        decoder,
        backend,
        num_blocks=96,
        num_host_blocks=12,
        block_size=BLOCK,
        kv_dtype=kv_dtype,
        grammars=grammars,
    )


@pytest.fixture
def harness(executor: Executor) -> Harness:
    executor.reset()
    vocab = executor.decoder.num_sampled
    prompt = [(7 * index * index + 31 * index + 5) % vocab for index in range(2 * BLOCK + 6)]
    harness = Harness(executor, prompt)
    harness.spoil()
    return harness


def test_cached_prefixes_of_every_length(harness: Harness) -> None:
    """All start behind a different number of the first one's blocks, in one plan, while it goes on."""
    prompt, count = harness.prompt, 4
    expected = harness.alone(prompt, count)
    owner = harness.blocks(len(prompt) + count)
    first = harness.step((2, 0, len(prompt), True), new_sequences=[harness.sequence(2, prompt, owner)])
    assert first[2] == expected[0]
    starts = {10 + shared: shared * BLOCK for shared in range((len(prompt) - 1) // BLOCK + 1)}
    later = [
        harness.sequence(
            item, prompt, owner[: start // BLOCK] + harness.blocks(len(prompt) + count - start), len(prompt)
        )
        for item, start in starts.items()
    ]
    entries = [(item, start, len(prompt) - start, True) for item, start in starts.items()]
    found = {item: [] for item in starts}
    for step in range(count):
        decode = [] if step == count - 1 else [(2, len(prompt) + step, 1, True)]
        sampled = harness.step(*entries, *decode, new_sequences=later)
        assert not decode or sampled[2] == expected[step + 1]
        for item in starts:
            found[item].append(sampled[item])
        entries, later = [(item, len(prompt) + step, 1, True) for item in starts], []
    assert all(sampled == expected for sampled in found.values())


def test_siblings_compute_the_last_token_of_a_shared_prompt_at_every_offset(harness: Harness) -> None:
    for length in range(BLOCK + 1, 2 * BLOCK + 1, 1 if harness.is_tiny else 5):
        prompt, mark = harness.prompt[:length], harness.next_block
        expected = harness.alone(prompt, 3)
        owner = harness.blocks(length + 3)
        assert harness.step((2, 0, length, True), new_sequences=[harness.sequence(2, prompt, owner)])[2] == expected[0]
        shared = (length - 1) // BLOCK
        table = owner[:shared] + harness.blocks(length + 3 - shared * BLOCK)
        # The block that holds the last token is copied for the tokens before it; there are none at an offset of 0.
        partial = (length - 1) % BLOCK > 0
        copies = pb.BlockMoves(
            source_block_ids=owner[shared : shared + partial], target_block_ids=table[shared : shared + partial]
        )
        sampled = harness.step(
            (2, length, 1, True),
            (3, length - 1, 1, True),
            new_sequences=[harness.sequence(3, prompt, table)],
            copies=copies,
        )
        assert sampled == {2: expected[1], 3: expected[0]}
        assert harness.step((2, length + 1, 1, True), (3, length, 1, True)) == {2: expected[2], 3: expected[1]}
        harness.next_block = mark
        harness.spoil()


def test_forks_with_copy_on_write_at_every_offset(harness: Harness) -> None:
    """A parent is forked behind each token, from below one block's end to the next one's; children live two steps."""
    prompt, count = harness.prompt, BLOCK + 4
    expected = harness.alone(prompt, count)
    table = harness.blocks(len(prompt) + count)
    sequence = harness.sequence(2, prompt, table)
    assert harness.step((2, 0, len(prompt), True), new_sequences=[sequence])[2] == expected[0]
    mark = harness.next_block
    for step in range(1, count - 1):
        known = len(prompt) + step - 1  # computed; the token behind it is sampled
        shared = known // BLOCK
        child = table[:shared] + harness.blocks(known + 2 - shared * BLOCK)
        partial = known % BLOCK > 0
        forks = pb.Forks(
            parent_sequence_ids=[2],
            child_sequence_ids=[3],
            token_ids=[expected[step - 1].token_id],
            block_counts=[len(child)],
            block_ids=child,
            token_counts=[known],
        )
        copies = pb.BlockMoves(
            source_block_ids=table[shared : shared + partial], target_block_ids=child[shared : shared + partial]
        )
        sampled = harness.step((2, known, 1, True), (3, known, 1, True), copies=copies, forks=forks)
        assert sampled == {2: expected[step], 3: expected[step]}
        assert harness.step((3, known + 1, 1, True)) == {3: expected[step + 1]}
        harness.next_block = mark
        harness.spoil()


@pytest.mark.parametrize("at", [1, 11])
def test_swap_out_and_in_again_in_the_middle(at: int, harness: Harness) -> None:
    """Other sequences use the blocks meanwhile; the sequence comes back to other blocks, known to the worker or not."""
    prompt, count = harness.prompt, 14
    expected = harness.alone(prompt, count)
    blocks = harness.blocks(len(prompt) + count)
    host = list(range(len(blocks), 0, -1))
    out = [harness.step((2, 0, len(prompt), True), new_sequences=[harness.sequence(2, prompt, blocks)])[2]]
    while len(out) < at:
        out.append(harness.step((2, len(prompt) + len(out) - 1, 1, True))[2])
    known = len(prompt) + at - 1
    used = -(-known // BLOCK)
    swap_out = pb.BlockMoves(source_block_ids=blocks[:used], target_block_ids=host[:used])
    # The blocks are used by another one in the very plan that moves them out.
    other = harness.sequence(3, prompt[::-1], blocks)
    result = harness.executor.execute(
        pb.StepPlan(swap_out=swap_out, new_sequences=[other], scheduled=schedule((3, 0, len(prompt), True)))
    )
    assert result.moved_byte_count == used * harness.executor.pool.layout.bytes_per_block
    again = harness.blocks(len(prompt) + count)
    back = harness.sequence(2, prompt + token_ids(out), again[:used], len(prompt))
    swap_in = pb.BlockMoves(source_block_ids=host[:used], target_block_ids=again[:used])
    new_blocks = {2: again[used:]}
    while len(out) < count:
        start = len(prompt) + len(out) - 1
        scheduled = schedule((3, len(prompt) + len(out) - at, 1, True), (2, start, 1, True), new_blocks=new_blocks)
        plan = pb.StepPlan(new_sequences=[back] if new_blocks else [], swap_in=swap_in, scheduled=scheduled)
        out.append(harness.execute(plan)[2])
        swap_in, new_blocks = pb.BlockMoves(), {}
    assert out == expected


@pytest.mark.parametrize(("at", "chunk"), [(1, 512), (3, 7), (11, 16)])
def test_recompute_of_prompt_and_output(at: int, chunk: int, harness: Harness) -> None:
    prompt, count = harness.prompt, 14
    expected = harness.alone(prompt, count)
    other = harness.sequence(3, prompt[::-1], harness.blocks(len(prompt) + count + 20))
    harness.step((3, 0, len(prompt), True), new_sequences=[other])
    tokens = prompt + token_ids(expected[:at])
    plan = {"new_sequences": [harness.sequence(2, tokens, harness.blocks(len(prompt) + count), len(prompt))]}
    out: list[Sampled] = []
    beside = len(prompt)
    for start in range(0, len(tokens), chunk):
        size = min(chunk, len(tokens) - start)
        sampled = harness.step((3, beside, 1, True), (2, start, size, start + size == len(tokens)), **plan)
        plan, beside = {}, beside + 1
        out += [sampled[2]] if 2 in sampled else []
    while len(out) < count - at:
        out.append(harness.step((2, len(tokens) + len(out) - 1, 1, True))[2])
    assert out == expected[at:]


PROCESSED: dict[str, dict[str, Any]] = {
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
    },
    "bias and bans": {
        "logit_bias_token_ids": [3, 40],
        "logit_biases": [60.0, 100.0],
        "bad_word_token_ids": [40, 3, 3],
        "bad_word_lengths": [1, 2],
    },
    "grammar": {"grammar": "start: /[a-z]{2}([0-9]{3}[A-Za-z]*|[A-Z]+)/"},
}


@pytest.mark.parametrize("name", PROCESSED)
def test_processed_sequences_recomputed_forked_and_beside_others(name: str, harness: Harness) -> None:
    """State that follows from the tokens: counts, ends of bad words, and where a grammar is."""
    prompt, count, at, params = harness.prompt, 12, 5, PROCESSED[name]
    expected = harness.alone(prompt, count, **params)
    plain = {key: params[key] for key in params.keys() & {"temperature"}}
    assert token_ids(expected) != token_ids(harness.alone(prompt, count, **plain))
    known = len(prompt) + at
    recomputed = prompt + token_ids(expected[:at])
    others = [
        harness.sequence(10 + index, prompt[::-1], harness.blocks(len(prompt) + count), **other)
        for index, other in enumerate((*PROCESSED.values(), {}))
    ]
    beside = [(item.sequence_id, 0, len(prompt), True) for item in others]
    parent = harness.sequence(2, recomputed, harness.blocks(len(prompt) + count), len(prompt), **params)
    harness.step(*beside, (2, 0, known, False), new_sequences=[*others, parent])
    child = [*parent.block_ids[: (known - 1) // BLOCK], *harness.blocks(count + BLOCK)]
    forks = pb.Forks(
        parent_sequence_ids=[2], child_sequence_ids=[3], token_ids=recomputed[-1:], block_counts=[len(child)],
        block_ids=child, token_counts=[known - 1],
    )  # fmt: skip
    copies = pb.BlockMoves(
        source_block_ids=[parent.block_ids[(known - 1) // BLOCK]], target_block_ids=[child[(known - 1) // BLOCK]]
    )
    plan: dict[str, Any] = {"copies": copies, "forks": forks}
    found: dict[int, list[Sampled]] = {2: [], 3: []}
    for step in range(count - at):
        entries = [(item, known - 1 + step, 1, True) for item in (3, 2)]
        decodes = [(item.sequence_id, len(prompt) + step, 1, True) for item in others]
        sampled = harness.step(*decodes[:2], *entries, *decodes[2:], **plan)
        plan = {}
        for item, tokens in found.items():
            tokens.append(sampled[item])
    assert found == {2: expected[at:], 3: expected[at:]}


def test_candidates_of_beams(harness: Harness) -> None:
    """A beam alone in fresh blocks against beams that were forked and stand beside others."""
    prompt, count = harness.prompt, 8

    def candidates_of(plan: pb.StepPlan) -> dict[int, list[tuple[int, float]]]:
        result = harness.executor.execute(plan)
        assert not result.errors
        return {item.sequence_id: list(zip(item.token_ids, item.logprobs, strict=True)) for item in result.candidates}

    def alone(tokens: list[int]) -> list[tuple[int, float]]:
        mark = harness.next_block
        beam = harness.sequence(1, tokens, harness.blocks(len(tokens)), len(prompt), candidate_count=count)
        found = candidates_of(pb.StepPlan(new_sequences=[beam], scheduled=schedule((1, 0, len(tokens), True))))[1]
        harness.execute(pb.StepPlan(release_sequence_ids=[1]))
        harness.next_block = mark
        harness.spoil()
        return found

    first = alone(prompt)
    assert len(first) == count
    parent = harness.sequence(2, prompt, harness.blocks(len(prompt) + 1), candidate_count=count)
    other = harness.sequence(3, prompt[::-1], harness.blocks(len(prompt) + 1))
    both = schedule((3, 0, len(prompt), True), (2, 0, len(prompt), True))
    assert candidates_of(pb.StepPlan(new_sequences=[parent, other], scheduled=both)) == {2: first}
    shared, last = parent.block_ids[:-1], parent.block_ids[-1]
    own = [last, *harness.blocks(3 * BLOCK)]
    picked = [token_id for token_id, _ in first[:4]]
    forks = pb.Forks(
        parent_sequence_ids=[2] * 4,
        child_sequence_ids=[2, 20, 21, 22],
        token_ids=picked,
        block_counts=[len(parent.block_ids)] * 4,
        block_ids=[block for tail in own for block in (*shared, tail)],
        token_counts=[len(prompt)] * 4,
    )
    copies = pb.BlockMoves(source_block_ids=[last] * 3, target_block_ids=own[1:])
    entries = [(item, len(prompt), 1, True) for item in (22, 3, 2, 21, 20)]
    second = candidates_of(pb.StepPlan(forks=forks, copies=copies, scheduled=schedule(*entries)))
    assert second == {item: alone([*prompt, token_id]) for item, token_id in zip((2, 20, 21, 22), picked, strict=True)}
