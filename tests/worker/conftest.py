"""What the worker's tests share: kernels, tiny models in memory, and an executor around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, KVLayout, load_backend
from octavo_worker.executor import Executor
from octavo_worker.grammar import GrammarEngine
from octavo_worker.kv_pool import KVPool, PoolSize
from octavo_worker.loaders.checkpoint import Checkpoint, open_checkpoint
from octavo_worker.loaders.source import INSTALLED_MODELS, find_model
from octavo_worker.models.decoder import Decoder
from octavo_worker.models.layers import Quantization
from tests.worker.checkpoints import letter_tokenizer, tiny_config, write_checkpoint

BLOCK_SIZE = 8


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models are many short ops, which torch's threads only slow down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def backend() -> Backend:
    return load_backend("reference")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file."""
    return find_model(next(iter(INSTALLED_MODELS))).path


def load_decoder(
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
) -> Decoder:
    num_sampled = min(checkpoint.config.vocab_size, checkpoint.tokenizer.size)
    return Decoder(
        checkpoint.config, checkpoint.weights, backend, dtype, num_sampled=num_sampled, quantization=quantization
    )


def layout_of(
    decoder: Decoder, backend: Backend, block_size: int = BLOCK_SIZE, dtype: torch.dtype | None = None
) -> KVLayout:
    """The layout of a pool for a decoder."""
    config = decoder.config
    return backend.kv_layout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype or decoder.dtype,
    )


def make_executor(
    decoder: Decoder,
    backend: Backend,
    *,
    num_blocks: int = 64,
    num_host_blocks: int = 8,
    block_size: int = BLOCK_SIZE,
    kv_dtype: torch.dtype | None = None,
    grammars: GrammarEngine | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Executor:
    layout = layout_of(decoder, backend, block_size, kv_dtype)
    pool = KVPool(layout, PoolSize(num_blocks, num_host_blocks), backend)
    return Executor(decoder, pool, backend, max_batched_tokens=512, grammars=grammars, on_progress=on_progress)


@pytest.fixture(scope="session")
def letters() -> GrammarEngine:
    """Grammars over `letter_tokenizer`, whose size is that of tiny models' vocabularies."""
    return GrammarEngine(letter_tokenizer())


@pytest.fixture(scope="session")
def decoder(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A tiny llama."""
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config())
    return load_decoder(open_checkpoint(find_model(str(folder))), backend)


@pytest.fixture
def executor(decoder: Decoder, backend: Backend) -> Executor:
    return make_executor(decoder, backend)


def new_sequence(sequence_id: int, tokens: list[int], blocks: list[int], **params: Any) -> pb.NewSequence:
    prompt_len = params.pop("prompt_len", len(tokens))
    return pb.NewSequence(
        sequence_id=sequence_id,
        prompt_token_count=prompt_len,
        token_ids=tokens,
        block_ids=blocks,
        params=pb.SequenceParams(**{"top_p": 1.0, **params}),
    )


def schedule(
    *entries: tuple[int, int, int, bool], new_blocks: dict[int, list[int]] | None = None
) -> pb.ScheduledSequences:
    """Columns out of (sequence id, start, count, samples)."""
    new_blocks = new_blocks or {}
    scheduled = pb.ScheduledSequences()
    for sequence_id, start, count, samples in entries:
        blocks = new_blocks.get(sequence_id, [])
        scheduled.sequence_ids.append(sequence_id)
        scheduled.start_positions.append(start)
        scheduled.token_counts.append(count)
        scheduled.samples.append(samples)
        scheduled.new_block_counts.append(len(blocks))
        scheduled.new_block_ids.extend(blocks)
    return scheduled


def generate(executor: Executor, sequence: pb.NewSequence, count: int, *, chunk: int = 512) -> list[int]:
    """Greedy or seeded tokens of one sequence, its prompt computed in chunks. Its blocks must suffice."""
    known = len(sequence.token_ids)
    plan, tokens = pb.StepPlan(new_sequences=[sequence]), []
    for start in range(0, known, chunk):
        size = min(chunk, known - start)
        plan.scheduled.MergeFrom(schedule((sequence.sequence_id, start, size, start + size == known)))
        result = executor.execute(plan)
        assert not result.errors
        tokens += result.token_ids
        plan = pb.StepPlan()
    while len(tokens) < count:
        step = schedule((sequence.sequence_id, known + len(tokens) - 1, 1, True))
        result = executor.execute(pb.StepPlan(scheduled=step))
        assert not result.errors
        tokens += result.token_ids
    executor.execute(pb.StepPlan(release_sequence_ids=[sequence.sequence_id]))
    return tokens
