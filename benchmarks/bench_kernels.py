"""Native CPU kernels against torch on the shapes of SmolLM2-135M: linear layers of one step, and attention. And the
layers of 8 and of 4 bits against the plain ones, and attention over K and V of 8 bits against those of --dtype.

Peers run in turns, so that a neighbour on the machine disturbs both alike; read the ratios. Torch's attention gets
dense, contiguous K and V, without paging. Run with `python benchmarks/bench_kernels.py --help` for its options.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo_kernels import AttentionBatch, KVLayout, LayerKV
from octavo_kernels.cpu.backend import CpuBackend, CpuLinear
from octavo_kernels.int4 import quantize_int4

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 576, 9, 3, 64, 1536, 49152, 30
# (out_features, in_features): queries, keys and values; output; gate and up; down.
LAYER_SHAPES = [((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN)]
LAYER_SHAPES.append((HIDDEN, INTERMEDIATE))
ROWS = (1, 8, 32, 64, 512)
# (sequences, context, query tokens of each)
ATTENTION = [(1, 160, 1), (32, 160, 1), (1, 2048, 1), (32, 2048, 1), (1, 512, 512), (1, 2048, 2048)]
INT8_KV = [(32, 160, 1), (32, 512, 1), (32, 2048, 1), (1, 2048, 1), (1, 8192, 1), (1, 2048, 512)]


def in_turns(peers: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median milliseconds of each peer; a first round warms up."""
    times: list[list[float]] = [[] for _ in peers]
    for round_number in range(rounds + 1):
        for peer, taken in zip(peers, times, strict=True):
            start = time.perf_counter()
            peer()
            if round_number > 0:
                taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def report(name: str, native: float, torch_time: float) -> None:
    print(f"| {name} | {native:.3f} | {torch_time:.3f} | {torch_time / native:.2f} |", flush=True)


def bench_linear(backend: CpuBackend, dtype: torch.dtype, rounds: int) -> None:
    """One step's linear layers with the head (at 512 rows without it, as in prefill)."""
    weights = [torch.randn(shape).to(dtype) * 0.02 for _ in range(LAYERS) for shape in LAYER_SHAPES]
    head = torch.randn(VOCAB, HIDDEN).to(dtype) * 0.02
    layers = [backend.linear(weight) for weight in weights]
    native_head = backend.linear(head)
    for rows in ROWS:
        inputs = {n: torch.randn(rows, n).to(dtype) for n in (HIDDEN, INTERMEDIATE)}
        with_head = rows < 512

        def native(inputs: dict[int, Tensor] = inputs, with_head: bool = with_head) -> None:
            for layer in layers:
                layer(inputs[layer.in_features])
            if with_head:
                native_head(inputs[HIDDEN])

        def peer(inputs: dict[int, Tensor] = inputs, with_head: bool = with_head) -> None:
            for weight in weights:
                functional.linear(inputs[weight.shape[1]], weight)
            if with_head:
                functional.linear(inputs[HIDDEN], head)

        report(f"linear, {rows} rows", *in_turns([native, peer], rounds))


def bench_quantized(backend: CpuBackend, dtype: torch.dtype, rounds: int) -> None:
    """The same layers in 8 and in 4 bits, as a decoder makes them: in 8 bits with scales for groups of 64 activations
    in output and down, in 4 bits with a head of 8."""
    weights = [torch.randn(shape) * 0.02 for shape in LAYER_SHAPES]
    groups = (None, 64, None, 64)
    head = torch.randn(VOCAB, HIDDEN) * 0.02
    plain = [backend.linear(weight.to(dtype)) for _ in range(LAYERS) for weight in weights]
    int8 = [
        backend.int8_linear(weight, dtype=dtype, group=group)
        for _ in range(LAYERS)
        for weight, group in zip(weights, groups, strict=True)
    ]
    grouped = [quantize_int4(weight) for weight in weights]
    int4 = [backend.int4_linear(weight, dtype=dtype) for _ in range(LAYERS) for weight in grouped]
    heads = [backend.int8_linear(head, dtype=dtype, group=group) for group in (None, 64)]
    plain_head = backend.linear(head.to(dtype))
    for rows in (1, 2, 4, *ROWS[1:]):
        inputs = {n: torch.randn(rows, n).to(dtype) for n in (HIDDEN, INTERMEDIATE)}

        def step(layers: list[CpuLinear], head: CpuLinear, inputs: dict[int, Tensor] = inputs) -> None:
            for layer in layers:
                layer(inputs[layer.in_features])
            if len(inputs[HIDDEN]) < 512:
                head(inputs[HIDDEN])

        peers: list[Callable[[], object]] = [
            lambda: step(int8, heads[0]),
            lambda: step(int4, heads[1]),
            lambda: step(plain, plain_head),
        ]
        in_8, in_4, unquantized = in_turns(peers, rounds)
        ratios = " | ".join(f"{ratio:.2f}" for ratio in (unquantized / in_8, unquantized / in_4, in_8 / in_4))
        print(f"| linear, {rows} rows | {in_8:.3f} | {in_4:.3f} | {unquantized:.3f} | {ratios} |", flush=True)


def filled_layers(num_layers: int, num_blocks: int, dtype: torch.dtype) -> tuple[LayerKV, ...]:
    """Layers of a pool that holds something everywhere; dtype: of K and V. Pages are huge, as a worker's are."""
    layout = KVLayout(num_layers, KV_HEADS, HEAD_DIM, 16, dtype)
    memory = mmap.mmap(-1, num_blocks * layout.bytes_per_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    layers = layout.layers(torch.frombuffer(memory, dtype=layout.pool_dtype).view(layout.pool_shape(num_blocks)))
    for kv in layers:
        for values in (kv.k, kv.v):
            values.random_(-127, 128) if layout.is_quantized else values.normal_()
        if kv.k_scales is not None and kv.v_scales is not None:
            kv.k_scales.fill_(0.02)
            kv.v_scales.fill_(0.02)
    return layers


def scattered(sequences: int, context: int, queries: int) -> AttentionBatch:
    """Sequences of one length, whose blocks lie scattered."""
    blocks = -(-context // 16)
    positions = torch.arange(context - queries, context).repeat(sequences).int()
    return AttentionBatch(
        positions=positions,
        slots=positions,
        query_starts=(torch.arange(sequences + 1) * queries).int(),
        context_lens=torch.full((sequences,), context).int(),
        block_tables=torch.randperm(sequences * blocks).view(sequences, blocks).int(),
    )


def bench_int8_kv(backend: CpuBackend, dtype: torch.dtype, rounds: int) -> None:
    """The same over K and V of 8 bits and of dtype. Smallest times of any layer: they show what memory allows."""
    for sequences, context, queries in INT8_KV:
        num_layers, num_blocks = (LAYERS if sequences * context <= 8192 else 4), sequences * -(-context // 16)
        both = [filled_layers(num_layers, num_blocks, kv_dtype) for kv_dtype in (torch.int8, dtype)]
        batch = scattered(sequences, context, queries)
        q = torch.randn(sequences * queries, HEADS, HEAD_DIM).to(dtype)
        taken: list[list[float]] = [[], []]
        for _ in range(rounds):
            for layers, times in zip(both, taken, strict=True):
                for kv in layers:
                    start = time.perf_counter()
                    backend.paged_attention(q, kv, batch, scale=HEAD_DIM**-0.5)
                    times.append((time.perf_counter() - start) * 1e3)
        report(f"attention, {sequences} x {context}, {queries} new", min(taken[0]), min(taken[1]))


def bench_attention(backend: CpuBackend, dtype: torch.dtype, rounds: int) -> None:
    """One layer's attention over scattered blocks, averaged over several layers so that caches stay honest."""
    for sequences, context, queries in ATTENTION:
        num_layers = LAYERS if sequences * context <= 8192 else 8
        blocks = -(-context // 16)
        layers = filled_layers(num_layers, sequences * blocks, dtype)
        batch = scattered(sequences, context, queries)
        q = torch.randn(sequences * queries, HEADS, HEAD_DIM).to(dtype)
        dense_q = q.view(sequences, queries, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        dense_kv = [torch.randn(sequences, KV_HEADS, context, HEAD_DIM).to(dtype) for _ in range(2)]

        def native(q: Tensor = q, layers: list = layers, batch: AttentionBatch = batch) -> None:  # type: ignore[type-arg]
            for layer in layers:
                backend.paged_attention(q, layer, batch, scale=HEAD_DIM**-0.5)

        def peer(q: Tensor = dense_q, kv: list[Tensor] = dense_kv, causal: bool = queries > 1) -> None:
            functional.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=causal, enable_gqa=True)

        native_time, torch_time = in_turns([native, peer], rounds)
        report(f"attention, {sequences} x {context}, {queries} new", native_time / num_layers, torch_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=None, help="default: the physical cores this process may use")
    parser.add_argument("--isa", default=None, help="instruction set; default: the most capable")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    backend = CpuBackend(num_threads=options.threads, isa=options.isa)
    torch.set_num_threads(backend.num_threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    print(f"{backend.describe()}; torch {torch.__version__}; {options.dtype}\n")
    print("| work | native, ms | torch, ms | torch / native |\n|---|---|---|---|")
    bench_linear(backend, dtype, options.rounds)
    bench_attention(backend, dtype, options.rounds)
    name = options.dtype
    print(f"\n| work | int8, ms | int4, ms | {name}, ms | {name} / int8 | {name} / int4 | int8 / int4 |")
    print("|---|---|---|---|---|---|---|")
    bench_quantized(backend, dtype, options.rounds)
    print(f"\n| work | int8 KV, ms | {options.dtype} KV, ms | {options.dtype} / int8 |\n|---|---|---|---|")
    bench_int8_kv(backend, dtype, options.rounds)


if __name__ == "__main__":
    main()
