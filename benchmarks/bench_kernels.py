"""Native CPU kernels against torch on the shapes of SmolLM2-135M: linear layers of one step, and attention. And the
8-bit layers against the plain ones.

Peers run in turns, so that a neighbour on the machine disturbs both alike; read the ratios. Torch's attention gets
dense, contiguous K and V, without paging. Run with `python benchmarks/bench_kernels.py --help` for its options.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo_kernels import AttentionBatch, KVLayout
from octavo_kernels.cpu.backend import CpuBackend, CpuLinear

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 576, 9, 3, 64, 1536, 49152, 30
# (out_features, in_features): queries, keys and values; output; gate and up; down.
LAYER_SHAPES = [((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN)]
LAYER_SHAPES.append((HIDDEN, INTERMEDIATE))
ROWS = (1, 8, 32, 64, 512)
# (sequences, context, query tokens of each)
ATTENTION = [(1, 160, 1), (32, 160, 1), (1, 2048, 1), (32, 2048, 1), (1, 512, 512), (1, 2048, 2048)]


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


def bench_int8(backend: CpuBackend, dtype: torch.dtype, rounds: int) -> None:
    """The same layers in 8 bits, as a decoder makes them: scales for groups of 64 activations in output and down."""
    weights = [torch.randn(shape) * 0.02 for shape in LAYER_SHAPES]
    groups = (None, 64, None, 64)
    head = torch.randn(VOCAB, HIDDEN) * 0.02
    plain = [backend.linear(weight.to(dtype)) for _ in range(LAYERS) for weight in weights]
    int8 = [
        backend.int8_linear(weight, dtype=dtype, group=group)
        for _ in range(LAYERS)
        for weight, group in zip(weights, groups, strict=True)
    ]
    heads = backend.int8_linear(head, dtype=dtype), backend.linear(head.to(dtype))
    for rows in ROWS:
        inputs = {n: torch.randn(rows, n).to(dtype) for n in (HIDDEN, INTERMEDIATE)}

        def step(layers: list[CpuLinear], head: CpuLinear, inputs: dict[int, Tensor] = inputs) -> None:
            for layer in layers:
                layer(inputs[layer.in_features])
            if len(inputs[HIDDEN]) < 512:
                head(inputs[HIDDEN])

        peers: list[Callable[[], object]] = [lambda: step(int8, heads[0]), lambda: step(plain, heads[1])]
        report(f"linear, {rows} rows", *in_turns(peers, rounds))


def bench_attention(backend: CpuBackend, dtype: torch.dtype, rounds: int) -> None:
    """One layer's attention over scattered blocks, averaged over several layers so that caches stay honest."""
    for sequences, context, queries in ATTENTION:
        num_layers = LAYERS if sequences * context <= 8192 else 8
        blocks = -(-context // 16)
        layout = KVLayout(num_layers, KV_HEADS, HEAD_DIM, 16, dtype)
        pool = torch.empty(layout.pool_shape(sequences * blocks), dtype=dtype).normal_()
        layers = [layout.layer(pool, i) for i in range(num_layers)]
        positions = torch.arange(context - queries, context).repeat(sequences).int()
        batch = AttentionBatch(
            positions=positions,
            slots=positions,
            query_starts=(torch.arange(sequences + 1) * queries).int(),
            context_lens=torch.full((sequences,), context).int(),
            block_tables=torch.randperm(sequences * blocks).view(sequences, blocks).int(),
        )
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
    print(f"\n| work | int8, ms | {options.dtype}, ms | {options.dtype} / int8 |\n|---|---|---|---|")
    bench_int8(backend, dtype, options.rounds)


if __name__ == "__main__":
    main()
