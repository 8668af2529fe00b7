"""What is done at start for a device whose kernels are compiled and whose memory is shared out once.

The memory that a step computes in is measured before the KV pool takes the rest; then every kind of step is done once,
so that no request waits for a compiler; then decode steps are recorded. All of it is told in the log, and shows as
progress. A backend that computes as it is called needs nothing of this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from octavo.config import GIB, WorkerConfig
from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels.backend import Backend, KVLayout, LayerKV
from octavo_kernels.decode_state import DecodeColumns, DecodeInputs
from octavo_worker.bans import num_words
from octavo_worker.batch import build_batch
from octavo_worker.decode_graphs import LARGEST_BUCKET, DecodeGraphs, buckets
from octavo_worker.device_table import DeviceTable
from octavo_worker.devices import Device
from octavo_worker.kv_pool import KVPool
from octavo_worker.models.decoder import Decoder
from octavo_worker.run_ahead import RunAhead
from octavo_worker.sampler import sample_columns, sample_uploaded
from octavo_worker.sequences import PARAMS_DTYPE, SequenceTable

_log = logging.getLogger(__name__)
NUM_SCRATCH_BLOCKS = 1
"""Blocks of the pool behind those that the router knows: for lanes of graphs without a sequence."""
# Rows that are sampled at once: as a graph gives, and one more, from which on kernels are the same for any number.
_MOST_SAMPLED = LARGEST_BUCKET + 1


@dataclass(frozen=True)
class TriedStep:
    """A step that is done once.

    prompts: tokens of each prompt; num_decodes: sequences that compute one token; context: tokens before each of these.
    """

    name: str
    prompts: tuple[int, ...]
    num_decodes: int
    context: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return sum(self.prompts) + self.num_decodes


def runs_ahead(backend: Backend, device: Device) -> bool:
    """Whether steps can be put into the device's queue before earlier ones are answered."""
    return backend.only_enqueues and device.is_asynchronous


def memory_of_steps(config: WorkerConfig, decoder: Decoder, backend: Backend, device: Device, layout: KVLayout) -> int:
    """Bytes beside weights and KV that steps need at most: of the largest step with its sampling, and of the recorded
    ones. 0 on a device whose memory is not shared out at start."""
    if not device.is_asynchronous:
        return 0
    num_tokens = config.max_num_batched_tokens
    largest = TriedStep("the largest step", _prompts(num_tokens, decoder.config.max_model_len), 0)
    needed = _measured(largest, decoder, backend, device, layout)
    if runs_ahead(backend, device):
        needed += NUM_SCRATCH_BLOCKS * layout.bytes_per_block
        if not config.enforce_eager:
            size = buckets(min(num_tokens, LARGEST_BUCKET))[-1]
            needed += _measured(TriedStep("a recorded step", (), size), decoder, backend, device, layout)
    _log.info("steps of %d tokens compute in %.2f GiB", num_tokens, needed / GIB)
    return needed


def prepare(
    config: WorkerConfig,
    decoder: Decoder,
    pool: KVPool,
    backend: Backend,
    device: Device,
    on_progress: Callable[[], None],
) -> RunAhead | None:
    """Compiles or loads every kernel that steps need and records decode steps. None for a backend that computes as it
    is called."""
    if not runs_ahead(backend, device):
        return None
    warm_up(decoder, pool, backend, device, config.max_num_batched_tokens, on_progress)
    graphs = None
    if config.enforce_eager or decoder.needs_prompt_lens:
        why = "--enforce-eager" if config.enforce_eager else "their rotary positions depend on the text's length"
        _log.info("decode steps are computed op by op: %s", why)
    else:
        most = min(config.max_num_batched_tokens, LARGEST_BUCKET)
        graphs = record(decoder, pool, backend, device, most, on_progress)
    return RunAhead(decoder, pool, backend, device, graphs)


@torch.inference_mode()
def record(
    decoder: Decoder,
    pool: KVPool,
    backend: Backend,
    device: Device,
    most: int,
    on_progress: Callable[[], None] = lambda: None,
) -> DecodeGraphs:
    """Graphs of decode steps of up to `most` sequences. The pool's first scratch block is theirs."""
    sizes, block_size = buckets(most), pool.layout.block_size
    max_blocks = -(-decoder.config.max_model_len // block_size)
    inputs = DecodeInputs.empty(
        sizes[-1],
        max_blocks,
        block_size=block_size,
        scratch_block=pool.size.num_device_blocks,
        device=device.torch_device,
    )
    known = DeviceTable(max_blocks, device.torch_device)
    known.grow(1)
    nobody = np.zeros(0, np.int64)
    columns = device.upload(known.columns(SequenceTable(1), nobody, nobody, nobody.astype(np.int32), sizes[0]))
    backend.advance_decode(known.state, DecodeColumns(*columns), inputs)  # no part of a graph, but of every step
    return DecodeGraphs(decoder, pool, device, inputs, sizes, on_progress)


@torch.inference_mode()
def warm_up(
    decoder: Decoder,
    pool: KVPool,
    backend: Backend,
    device: Device,
    most_tokens: int,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Does every kind of step once in the pool's blocks, which must hold nothing yet, and leaves zeros there."""
    started = time.monotonic()
    steps = _tried_steps(most_tokens, decoder.config.max_model_len)
    for number, step in enumerate(steps):
        began = time.monotonic()
        _try_step(step, decoder, backend, device, pool.layout, pool.layers, pool.size.num_device_blocks)
        device.synchronize()
        on_progress()
        _log.info(
            "kernels are ready for %d of %d kinds of steps: %s, %.1f s",
            number + 1,
            len(steps),
            step.name,
            time.monotonic() - began,
        )
    first = torch.zeros(1, dtype=torch.int64)
    pool.copy(first, torch.full_like(first, pool.size.num_device_blocks))
    if pool.size.num_host_blocks:
        pool.swap_out(first, first)
        pool.swap_in(first, first)
    device.synchronize()
    pool.device.zero_()
    _log.info("all kernels are ready after %.1f s", time.monotonic() - started)


def _tried_steps(most_tokens: int, longest: int) -> list[TriedStep]:
    """Kinds of steps of at most most_tokens tokens between which kernels or their variants differ.

    longest: tokens of a text at most
    """
    steps = [
        TriedStep("one token", (), 1),
        TriedStep("8 sequences' tokens", (), 8),
        TriedStep("a token at the end of the longest text", (), 1, longest - 1),
        *(
            TriedStep(f"prompts of {count} tokens", _prompts(count, longest), 0)
            for count in sorted({2, 16, 32, 64, 128, 512, 2048, most_tokens})
        ),
        TriedStep("prompts of 32 tokens beside 8 sequences' tokens", _prompts(32, longest), 8),
        TriedStep("prompts of 384 tokens beside 64 sequences' tokens", _prompts(384, longest), 64),
    ]
    return [step for step in steps if step.num_tokens <= most_tokens]


def _prompts(num_tokens: int, longest: int) -> tuple[int, ...]:
    """As few prompts as so many tokens make, none longer than the longest text."""
    rest = num_tokens % longest
    return (longest,) * (num_tokens // longest) + ((rest,) if rest else ())


def _measured(step: TriedStep, decoder: Decoder, backend: Backend, device: Device, layout: KVLayout) -> int:
    """Bytes that a step holds at most beside a pool of its own."""
    pool = torch.zeros(layout.pool_shape(1), dtype=layout.pool_dtype, device=device.torch_device)
    layers = layout.layers(pool)
    _try_step(step, decoder, backend, device, layout, layers, 1)  # libraries take memory for good at first
    return device.peak_memory(lambda: _try_step(step, decoder, backend, device, layout, layers, 1))


@torch.inference_mode()
def _try_step(
    step: TriedStep,
    decoder: Decoder,
    backend: Backend,
    device: Device,
    layout: KVLayout,
    layers: tuple[LayerKV, ...],
    num_blocks: int,
) -> None:
    """Computes a step and samples behind as many of its tokens as a step may have sequences, in all ways.

    What it computes is nobody's, so a step that needs more than the num_blocks blocks there are has some several times.
    """
    block_size = layout.block_size
    starts = np.array([*([0] * len(step.prompts)), *([step.context] * step.num_decodes)], np.int64)
    counts = np.array([*step.prompts, *([1] * step.num_decodes)], np.int64)
    ends = starts + counts
    table = SequenceTable(len(counts))
    vocab, first_block = decoder.config.vocab_size, 0
    for number, end in enumerate(ends.tolist()):
        tokens = (np.arange(end) % vocab).astype(np.int32)
        blocks = (first_block + np.arange(-(-end // block_size))) % num_blocks
        table.put(number, tokens, blocks.astype(np.int32), end, pb.SequenceParams())
        first_block += len(blocks)
    rows = table.find(list(range(len(counts))))
    batch = build_batch(
        table,
        rows,
        starts,
        counts,
        block_size=block_size,
        upload=device.upload,
        with_prompt_lens=decoder.needs_prompt_lens,
    )
    hidden = decoder.hidden(
        batch.token_ids,
        batch.attention,
        layers,
        prompt_lens=batch.prompt_lens,
    )
    sampled = np.arange(min(step.num_tokens, _MOST_SAMPLED))
    params = np.zeros(len(sampled), PARAMS_DTYPE)
    params["top_p"], params["temperature"] = 0.9, 1.0
    for top_p in (0.9, 1.0):
        params["top_p"] = top_p
        logit_rows, *columns = device.upload([sampled, *sample_columns(params, sampled)])
        logits = decoder.logits(hidden, logit_rows)
        sample_uploaded(logits, columns, backend)
    masks = np.full((1, num_words(decoder.num_sampled)), -1, np.int32)
    first, masks_there = device.upload([np.zeros(1, np.int64), masks])
    backend.ban_tokens(logits, first, masks_there)
