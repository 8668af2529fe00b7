"""Each kernel's time against its own floor: the bytes that it must move by the measured rate of a copy, or the
operations that it must do by the measured rate of a matrix product, whichever takes longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from floor import Rates
from torch import Tensor

from gpu.attention import paged_pass
from gpu.bench import Bench
from gpu.quantized import quantized_layers
from gpu.rows import Row

_MOST_POOL_BYTES = 6 << 30


@dataclass(frozen=True)
class _Work:
    """One call of a kernel, with the least that it moves and does."""

    name: str
    call: Callable[[], Tensor]
    num_bytes: float
    num_flops: float
    goal: str = ""


def measure_rates(bench: Bench) -> Rates:
    """Of a large copy within the device, bytes read and written, and of a large product of random matrices."""
    sizes, device = bench.sizes, bench.device.torch_device
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copying = bench.seconds(lambda: target.copy_(source))
    a, b = bench.normal(sizes.matrix, sizes.matrix), bench.normal(sizes.matrix, sizes.matrix, seed=1)
    multiplying = bench.seconds(lambda: a @ b)
    return Rates(2 * sizes.copy_bytes / copying, 2 * sizes.matrix**3 / multiplying)


def kernel_cases(bench: Bench, rates: Rates) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """A case for each kernel: floor over time, so 1 is the floor itself."""
    for work in _works(bench):

        def measure(work: _Work = work) -> Iterator[Row]:
            seconds = bench.seconds(work.call)
            floor = max(work.num_bytes / rates.bytes_per_s, work.num_flops / rates.flops_per_s)
            facts = {"bytes": work.num_bytes, "flops": work.num_flops, "floor_s": floor}
            yield Row(work.name, seconds * 1e6, "us", floor / seconds, "of the floor's speed", work.goal, facts)

        yield work.name, measure


def _works(bench: Bench) -> Iterator[_Work]:
    yield from _elementwise(bench)
    yield from _linear(bench)
    yield from _quantized(bench)
    yield from _attention(bench)
    yield from _sampling(bench)


def _elementwise(bench: Bench) -> Iterator[_Work]:
    ops, model, rows = bench.backend, bench.sizes.model, bench.sizes.rows
    item = bench.sizes.dtype.itemsize
    hidden, inner = model.hidden_size, model.intermediate_size
    x, gains = bench.normal(rows, hidden), bench.normal(hidden, seed=1)
    yield _Work(f"rms_norm, {rows} x {hidden}", lambda: ops.rms_norm(x, gains, 1e-5), 2 * rows * hidden * item, 0)
    gate_up = bench.normal(rows, 2 * inner)
    yield _Work(f"silu_mul, {rows} x {inner}", lambda: ops.silu_mul(gate_up), 3 * rows * inner * item, 0)
    prompt = paged_pass(bench, sequences=1, context=rows, queries=rows)
    cos_sin = torch.randn(rows, model.head_dim, device=bench.device.torch_device)

    def rotate() -> Tensor:
        ops.rotary(prompt.q, prompt.batch.positions, cos_sin)
        return prompt.q

    yield _Work(f"rotary, {rows} tokens", rotate, 2 * prompt.q.nbytes + cos_sin.nbytes, 0)

    def write() -> Tensor:
        ops.write_kv(prompt.k, prompt.v, prompt.kv, prompt.batch.slots)
        return prompt.k

    yield _Work(f"write_kv, {rows} tokens", write, 4 * prompt.k.nbytes, 0)


def _linear(bench: Bench) -> Iterator[_Work]:
    ops, model, item = bench.backend, bench.sizes.model, bench.sizes.dtype.itemsize
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    shapes = {"qkv": (width, model.hidden_size), "gate and up": (2 * model.intermediate_size, model.hidden_size)}
    shapes["down"] = (model.hidden_size, model.intermediate_size)
    for name, (out, inputs) in shapes.items():
        # Several copies in turn, so that no weight is found in a cache.
        layers = [ops.linear(bench.normal(out, inputs, scale=0.02, seed=seed)) for seed in range(4)]
        for rows in (1, 64, bench.sizes.prefill):
            x = bench.normal(rows, inputs)

            def multiply(layers=layers, x=x) -> Tensor:  # type: ignore[no-untyped-def]
                layers.append(layers.pop(0))
                result: Tensor = layers[0](x)
                return result

            num_bytes = (out * inputs + rows * (out + inputs)) * item
            yield _Work(f"linear, {name}, {rows} rows", multiply, num_bytes, 2 * rows * out * inputs)


def _quantized(bench: Bench) -> Iterator[_Work]:
    model, item = bench.sizes.model, bench.sizes.dtype.itemsize
    out, inputs = 2 * model.intermediate_size, model.hidden_size
    for made in quantized_layers(bench, out, inputs):
        for rows in (1, 64, bench.sizes.prefill):
            x = bench.normal(rows, inputs)
            yield _Work(
                f"{made.name}, gate and up, {rows} rows",
                lambda made=made, x=x: made.layer(x),  # type: ignore[misc]
                made.weight_bytes + rows * (out + inputs) * item,
                2 * rows * out * inputs,
            )


def _attention(bench: Bench) -> Iterator[_Work]:
    ops, model, item = bench.backend, bench.sizes.model, bench.sizes.dtype.itemsize
    per_token = 2 * model.num_kv_heads * model.head_dim * item
    longest = max(bench.sizes.contexts)
    for batch in bench.sizes.batches:
        for context in bench.sizes.contexts:
            if batch * context * per_token > _MOST_POOL_BYTES:
                continue
            case = paged_pass(bench, sequences=batch, context=context, queries=1)
            goal = "0.85 or more" if (batch, context) == (64, longest) else ""
            yield _Work(
                f"attention, decode, {batch} x {context}",
                lambda case=case: ops.paged_attention(case.q, case.kv, case.batch, scale=case.scale),  # type: ignore[misc]
                batch * context * per_token + 2 * case.q.nbytes,
                4 * batch * context * model.num_heads * model.head_dim,
                goal,
            )
    count = bench.sizes.prefill
    prompt = paged_pass(bench, sequences=1, context=count, queries=count)
    yield _Work(
        f"attention, prompt of {count}",
        lambda: ops.paged_attention(prompt.q, prompt.kv, prompt.batch, scale=prompt.scale),
        count * per_token + 2 * prompt.q.nbytes,
        2 * count * (count + 1) * model.num_heads * model.head_dim,
    )


def _sampling(bench: Bench) -> Iterator[_Work]:
    ops, device, rows = bench.backend, bench.device.torch_device, max(bench.sizes.batches)
    logits = torch.randn(rows, bench.sizes.model.vocab_size, device=device) * 3
    temperatures, seeds = torch.ones(rows, device=device), torch.arange(rows, device=device)
    top_k, min_p = torch.full((rows,), 50, device=device), torch.zeros(rows, device=device)
    top_p = torch.full((rows,), 0.9, device=device)
    yield _Work(
        f"gumbel_argmax, {rows} rows", lambda: ops.gumbel_argmax(logits, temperatures, seeds, seeds), logits.nbytes, 0
    )
    yield _Work(
        f"least_kept, {rows} rows",
        lambda: ops.least_kept(logits, temperatures, top_k, top_p, min_p),
        logits.nbytes,
        0,
    )
