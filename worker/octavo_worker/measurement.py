"""Measures at the start how fast this worker computes prompts and swaps, between which a router has to choose.

It also warms up. It computes in the pool's first blocks, which hold nothing yet, and leaves zeros in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.batch import build_batch
from octavo_worker.devices import Device
from octavo_worker.kv_pool import KVPool
from octavo_worker.models.decoder import Decoder
from octavo_worker.sequences import SequenceTable

_WARM_UP_TOKENS, _MOST_TOKENS = 16, 128
_MEASURED_S = 0.15  # how long a measured pass may take: it holds up the start
# On a device beside the host a pass of few tokens takes the time of its launches, and tells nothing of the device.
_MOST_BESIDE = 2048
_SWAPPED_BYTES, _SWAP_ROUNDS = 8 << 20, 3


@torch.inference_mode()
def measure_prefill(decoder: Decoder, pool: KVPool, device: Device, most_tokens: int) -> float:
    """Tokens of prompt a second. most_tokens: of a step.

    A small pass warms up. It is the measurement as well where a longer one would take too long or does not fit; it
    tells less than the worker can do, since more tokens share the reading of the weights. On an asynchronous device
    the longer one is always made.
    """
    room, is_beside = min(most_tokens, _room(decoder, pool)), device.is_asynchronous
    num_warm_up, num_tokens = min(_WARM_UP_TOKENS, room), min(_MOST_BESIDE if is_beside else _MOST_TOKENS, room)
    rate = num_warm_up / _time_pass(decoder, pool, device, num_warm_up)
    if num_tokens > num_warm_up and (is_beside or num_tokens / rate <= _MEASURED_S):
        rate = max(rate, num_tokens / _time_pass(decoder, pool, device, num_tokens))
    pool.device[: -(-num_tokens // pool.layout.block_size)].zero_()
    return rate


def measure_swap(pool: KVPool, device: Device) -> float:
    """Bytes a second between device and host, of the slower direction, beside no computing; 0 without a host tier."""
    num_blocks = min(pool.size.num_device_blocks, pool.size.num_host_blocks)
    num_blocks = min(num_blocks, max(_SWAPPED_BYTES // pool.layout.bytes_per_block, 1))
    if not num_blocks:
        return 0.0
    blocks = torch.arange(num_blocks)
    pool.swap_out(blocks, blocks)  # first touches of memory cost more than the move, and are not to be measured
    pool.swap_in(blocks, blocks)
    slowest = 0.0
    for move in (pool.swap_out, pool.swap_in):
        slowest = max(slowest, min(_time_move(move, blocks, device) for _ in range(_SWAP_ROUNDS)))
    return num_blocks * pool.layout.bytes_per_block / slowest


def _time_move(move: Callable[[Tensor, Tensor], int], blocks: Tensor, device: Device) -> float:
    """Seconds that a move takes until the device is through with it."""
    started = time.monotonic()
    move(blocks, blocks)
    device.synchronize()
    return time.monotonic() - started


def _room(decoder: Decoder, pool: KVPool) -> int:
    """Tokens that the longest prompt can have here."""
    return min(pool.size.num_device_blocks * pool.layout.block_size, decoder.config.max_model_len)


def _time_pass(decoder: Decoder, pool: KVPool, device: Device, num_tokens: int) -> float:
    """Seconds that one prompt of this many tokens takes."""
    block_size = pool.layout.block_size
    table = SequenceTable(1)
    tokens = (np.arange(num_tokens) % decoder.config.vocab_size).astype(np.int32)
    blocks = np.arange(-(-num_tokens // block_size), dtype=np.int32)
    row = np.array([table.put(0, tokens, blocks, num_tokens, pb.SequenceParams())])
    counts = np.array([num_tokens])
    batch = build_batch(
        table,
        row,
        np.zeros_like(counts),
        counts,
        block_size=block_size,
        upload=device.upload,
        with_prompt_lens=decoder.needs_prompt_lens,
    )
    started = time.monotonic()
    logits = decoder.forward(
        batch.token_ids,
        batch.attention,
        pool.layers,
        torch.tensor([num_tokens - 1], device=device.torch_device),
        prompt_lens=batch.prompt_lens,
    )
    logits.cpu()  # waits for the device
    return time.monotonic() - started
