"""Which variants of Triton's kernels a worker launches that its start has not compiled: prints them as JSON.

    python -m tests.worker.triton_variants SETTINGS

Runs in a process of its own, where Triton compiles for a GPU that is not there: its hook ahead of each compilation
writes the variant down and forbids it, so that no kernel runs, and results are the zeros they are stored in.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from octavo.config import WorkerConfig
from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend
from octavo_kernels.triton import device as triton_device
from octavo_worker.device import resolve_kv_dtype, resolve_quantization
from octavo_worker.executor import Executor
from octavo_worker.kv_pool import KVPool, PoolSize
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from octavo_worker.preparation import NUM_SCRATCH_BLOCKS, prepare
from tests.worker.checkpoints import tiny_config, write_checkpoint
from tests.worker.conftest import layout_of, new_sequence, schedule
from tests.worker.late_device import LateDevice

MAX_MODEL_LEN, MOST_TOKENS, BLOCK_SIZE, NUM_BLOCKS = 4096, 512, 16, 40
# Heads that no power of two divides, as SmolLM2 has them: offsets into what is as long as they are many fall anywhere.
MODEL = tiny_config(
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=MAX_MODEL_LEN,
    torch_dtype="bfloat16",
)
PARAMS = (
    {},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9, "return_logprobs": True, "top_logprob_count": 2},
    {"suppressed_token_ids": [7], "presence_penalty": 0.5},
    {"return_prompt_logprobs": True, "temperature": 0.5},
)


class Driver:
    """As much of Triton's driver as it asks before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Variants:
    """Triton's hook: all variants so far, and by `take` those that came since."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._new: list[str] = []

    def __call__(self, *, key: str, fn: Any, repr: str, **_: Any) -> bool:
        name = f"{fn.name} {key}"
        if name not in self._seen:
            self._seen.add(name)
            self._new.append(f"{repr} {key}")
        return True

    def take(self) -> list[str]:
        new, self._new = self._new, []
        return new


def plan(number: int, generator: np.random.Generator) -> pb.StepPlan:
    """A step like no other: some decodes at any places, some chunks of prompts, sampled in all ways."""
    kind = number % 3
    num_decodes = 0 if kind == 1 else int(generator.integers(1, 400)) if number % 2 else int(generator.integers(1, 12))
    counts = [1] * num_decodes
    while kind and len(counts) < num_decodes + 3 and (room := MOST_TOKENS - sum(counts)) > 1:
        counts.append(int(min(generator.integers(1, 12) if number % 4 < 2 else generator.integers(1, room + 1), room)))
    longest = int(generator.choice([20, 250, 900, MAX_MODEL_LEN - MOST_TOKENS]))
    starts = [int(start) for start in generator.integers(0, longest, len(counts))]
    ids = range(1, len(counts) + 1)
    params = PARAMS[number // 3 % len(PARAMS)]
    sequences = []
    for sequence_id, start, count in zip(ids, starts, counts, strict=True):
        end = start + count
        blocks = [(sequence_id + i) % NUM_BLOCKS for i in range(-(-(end + 1) // BLOCK_SIZE))]
        prompt_len = end if count > 1 or start == 0 else end - 1
        tokens = [i % 90 for i in range(end)]
        sequences.append(new_sequence(sequence_id, tokens, blocks, prompt_len=prompt_len, **params))
    moves = pb.BlockMoves(source_block_ids=[*range(number % 5)], target_block_ids=[*range(number % 5)])
    copies = pb.BlockMoves(source_block_ids=[*range(number % 5)], target_block_ids=[*range(30, 30 + number % 5)])
    columns = zip(ids, starts, counts, strict=True)
    return pb.StepPlan(
        release_sequence_ids=list(range(1, MOST_TOKENS + 1)),
        new_sequences=sequences,
        scheduled=schedule(*((sequence_id, start, count, True) for sequence_id, start, count in columns)),
        swap_out=moves,
        swap_in=moves,
        copies=copies,
    )


def gpu_backend(variants: Variants) -> Backend:
    """The kernels' backend as it is beside an H200, whose memory is the host's here."""
    torch.empty = torch.zeros
    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_cache_hook = variants
    triton_device.device_traits = lambda device: triton_device.DeviceTraits(
        num_sms=132, shared_memory=triton_device.LARGE_SHARED_MEMORY, native_float8=True, interpreted=False
    )
    from octavo_kernels.triton.backend import TritonBackend  # not before: what it imports asks for these traits

    return TritonBackend("cpu")


def load(config: WorkerConfig, backend: Backend) -> tuple[Decoder, KVPool]:
    """A tiny model and its pool."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(find_model(str(write_checkpoint(Path(folder), MODEL))))
        decoder = Decoder(
            checkpoint.config,
            checkpoint.weights,
            backend,
            torch.bfloat16,
            num_sampled=min(checkpoint.config.vocab_size, checkpoint.tokenizer.size),
            quantization=resolve_quantization(config, "bfloat16", backend, is_quantized=False),
        )
    _, kv_dtype = resolve_kv_dtype(config, "bfloat16", backend)
    layout = layout_of(decoder, backend, BLOCK_SIZE, kv_dtype)
    return decoder, KVPool(layout, PoolSize(NUM_BLOCKS, 8), backend, NUM_SCRATCH_BLOCKS)


def main(settings: str) -> None:
    torch.set_num_threads(1)
    variants, device = Variants(), LateDevice()
    backend = gpu_backend(variants)
    config = WorkerConfig(max_num_batched_tokens=MOST_TOKENS, **json.loads(settings))
    decoder, pool = load(config, backend)
    ahead = prepare(config, decoder, pool, backend, device, lambda: None)
    prepared = variants.take()
    executor = Executor(decoder, pool, backend, max_batched_tokens=MOST_TOKENS, device=device, ahead=ahead)
    generator, late = np.random.default_rng(3), {}
    for number in range(60):
        step = plan(number, generator)
        result = executor.execute(step)
        assert not result.errors, result.errors
        if new := variants.take():
            columns = zip(step.scheduled.start_positions, step.scheduled.token_counts, strict=True)
            late[f"step {number}: {sorted(columns)}"] = new
    print(json.dumps({"prepared": len(prepared), "late": late}))


if __name__ == "__main__":
    main(sys.argv[1])
