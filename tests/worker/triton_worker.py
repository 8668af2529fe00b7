"""A whole worker on Triton's kernels in Triton's interpreter, and on the oracle: prints what both sampled, as JSON.

    TRITON_INTERPRET=1 python -m tests.worker.triton_worker CASE [SETTING=VALUE ...]

Runs in a process of its own, for kernels are interpreted or compiled for a whole process. Prompts are computed in
chunks beside decodes, a sequence is forked, swapped out and in, one ends and another comes: once with steps that run
ahead of their answers, decode steps as graphs, on a device that answers late; once, step by step, by the worker that
the program assembles.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.config import WorkerConfig
from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, Int4Weight
from octavo_kernels.reference import ReferenceBackend
from octavo_kernels.reference_linear import ReferenceLinear
from octavo_worker.assembly import Worker, assemble
from octavo_worker.device import resolve_kv_dtype, resolve_quantization
from octavo_worker.executor import Executor
from octavo_worker.executor_thread import ExecutorThread
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from tests.worker.cases import MODEL_CASES
from tests.worker.checkpoints import write_checkpoint
from tests.worker.conftest import make_executor, new_sequence, schedule
from tests.worker.late_device import LateDevice, make_late_executor

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
SAMPLED = {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 20}
SCORED = {"return_logprobs": True, "top_logprob_count": 2, "presence_penalty": 0.5, "suppressed_token_ids": [7]}


def plans() -> list[pb.StepPlan]:
    """A small history of a worker with blocks of 8 tokens."""
    moves = {
        "swap_out": pb.BlockMoves(source_block_ids=[0, 1], target_block_ids=[3, 2]),
        "swap_in": pb.BlockMoves(source_block_ids=[3, 2], target_block_ids=[20, 21]),
    }
    moved = new_sequence(5, [*PROMPT, 1], [20, 21], prompt_len=13)  # token 14 is what is sampled anyway, or not
    fork = pb.Forks(
        parent_sequence_ids=[2], child_sequence_ids=[4], token_ids=[11], block_counts=[2], block_ids=[12, 13],
        token_counts=[6],
    )  # fmt: skip
    return [
        pb.StepPlan(new_sequences=[new_sequence(1, PROMPT, [0, 1])], scheduled=schedule((1, 0, 5, False))),
        pb.StepPlan(
            new_sequences=[new_sequence(2, PROMPT[:5], [2], **SAMPLED)],
            scheduled=schedule((2, 0, 5, True), (1, 5, 8, True)),
        ),
        pb.StepPlan(scheduled=schedule((1, 13, 1, True), (2, 5, 1, True))),
        pb.StepPlan(scheduled=schedule((1, 14, 1, True), (2, 6, 1, True))),
        pb.StepPlan(
            new_sequences=[new_sequence(3, PROMPT[3:9], [4, 5], **SCORED)],
            scheduled=schedule((1, 15, 1, True), (2, 7, 1, True), (3, 0, 6, True)),
        ),
        pb.StepPlan(
            release_sequence_ids=[3],
            scheduled=schedule((1, 16, 1, True), (2, 8, 1, True), new_blocks={1: [6], 2: [7]}),
        ),
        pb.StepPlan(
            **moves,
            copies=pb.BlockMoves(source_block_ids=[2], target_block_ids=[12]),
            forks=fork,
            new_sequences=[moved],
            scheduled=schedule((4, 6, 1, True), (5, 13, 1, True), (1, 17, 1, True)),
        ),
        pb.StepPlan(scheduled=schedule((4, 7, 1, True), (5, 14, 1, True), (1, 18, 1, True), (2, 9, 1, True))),
    ]


def run(executor: Executor, in_flight: int) -> dict[str, Any]:
    """The tokens of each sequence, and the log-probabilities, rounded."""
    tokens: dict[int, list[int]] = defaultdict(list)
    logprobs: list[float] = []
    under_way = []
    for plan in [*plans(), *[None] * in_flight]:
        if plan is not None:
            under_way.append(executor.begin(plan))
        if len(under_way) >= in_flight or (plan is None and under_way):
            result = under_way.pop(0).finish()
            assert not result.errors, result.errors
            logprobs += [round(value, 3) for value in result.logprobs.logprobs]
            for sequence_id, token_id in zip(result.sequence_ids, result.token_ids, strict=True):
                tokens[sequence_id].append(token_id)
    return {"tokens": dict(tokens), "logprobs": logprobs}


class Oracle(ReferenceBackend):
    """The reference, with a GPU's layers of 4 bits."""

    def int4_linear(  # type: ignore[override]
        self,
        weight: Int4Weight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> ReferenceLinear:
        return self.linear(weight.dequantize().to(dtype), bias, out_dtype=out_dtype)


def load(case: str, backend: Backend, folder: Path, config: WorkerConfig) -> Decoder:
    checkpoint = open_checkpoint(find_model(str(write_checkpoint(folder, MODEL_CASES[case]))))
    num_sampled = min(checkpoint.config.vocab_size, checkpoint.tokenizer.size)
    quantization = resolve_quantization(config, "float32", backend, is_quantized=False)
    return Decoder(
        checkpoint.config,
        checkpoint.weights,
        backend,
        torch.float32,
        num_sampled=num_sampled,
        quantization=quantization,
    )


def assembled(folder: Path, config: WorkerConfig) -> Worker:
    """The worker that the program makes of its settings."""
    config = replace(
        config,
        model=str(folder),
        device="cpu",
        kernel_backend="triton",
        dtype="float32",
        block_size=8,
        num_device_blocks=64,
        swap_space=0.001,
    )
    thread = ExecutorThread()
    return thread.submit(lambda: assemble(config, find_model(str(folder)), thread)).result()


def main(case: str, *settings: str) -> None:
    from octavo_kernels.triton.backend import TritonBackend

    torch.set_num_threads(1)
    config = WorkerConfig.from_values(dict(setting.split("=") for setting in settings))
    reference, triton, device = Oracle(), TritonBackend("cpu"), LateDevice()
    _, kv_dtype = resolve_kv_dtype(config, "float32", triton)
    with tempfile.TemporaryDirectory() as folder:
        oracle = make_executor(load(case, reference, Path(folder) / "a", config), reference, kv_dtype=kv_dtype)
        expected = run(oracle, in_flight=1)
        decoder = load(case, triton, Path(folder) / "b", config)
        ahead = make_late_executor(decoder, triton, device, sizes=(1, 2, 4), kv_dtype=kv_dtype)
        found = run(ahead, in_flight=2)
        worker = assembled(Path(folder) / "b", config)
        plainly = run(worker.executor, in_flight=1)
    answer = {"expected": expected, "ahead": found, "plainly": plainly, "device": device.log}
    about = {"backend": worker.description.backend, "kv_dtype": worker.description.kv_memory.dtype}
    print(json.dumps({**answer, **about}))


if __name__ == "__main__":
    main(*sys.argv[1:])
