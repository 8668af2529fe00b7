"""Each kernel's time against its own floor: the bytes that it must move by the measured rate of a copy, or the
operations that it must do by the measured rate of a matrix product, whichever takes longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from floor import Rates
from torch import Tensor

from gpu.attention import Pass, paged_pass
from gpu.bench import Bench
from gpu.quantized import MakeLayer, quantized_layers
from gpu.rows import Row
from octavo_kernels.decode_state import FROM_STATE, DecodeColumns, DecodeInputs, DecodeState

_MOST_POOL_BYTES = 6 << 30
_GOAL_BATCH = 64
_E4M3 = torch.float8_e4m3fn
_SCALE_BYTES = 4


@dataclass(frozen=True)
class _Call:
    """A kernel's call, with the least that it moves and does."""

    call: Callable[[], Tensor]
    num_bytes: float
    num_flops: float = 0.0


@dataclass(frozen=True)
class _Work:
    """make: gives the call with its inputs, when its turn has come: inputs that fail are that kernel's failure alone,
    and are gone before the next one's."""

    name: str
    make: Callable[[], _Call]
    at_least: float | None = None


def measure_rates(bench: Bench) -> Rates:
    """Of a large copy within the device, bytes read and written, and of a large product of random matrices."""
    sizes, device = bench.sizes, bench.device.torch_device
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device).random_(generator=bench.generator(0))
    target = torch.empty_like(source)
    copying = bench.seconds(lambda: target.copy_(source))
    a, b = bench.normal(sizes.matrix, sizes.matrix), bench.normal(sizes.matrix, sizes.matrix, seed=1)
    multiplying = bench.seconds(lambda: a @ b)
    return Rates(2 * sizes.copy_bytes / copying, 2 * sizes.matrix**3 / multiplying)


def kernel_cases(bench: Bench, rates: Callable[[], Rates]) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """A case for each kernel, those with a goal first: floor over time, so 1 is the floor itself. rates: measures them,
    or knows them."""
    for work in sorted(_works(bench), key=lambda work: work.at_least is None):

        def measure(work: _Work = work) -> Iterator[Row]:
            known, made = rates(), work.make()
            seconds = bench.seconds(made.call)
            floor = max(made.num_bytes / known.bytes_per_s, made.num_flops / known.flops_per_s)
            facts = {"bytes": made.num_bytes, "flops": made.num_flops, "floor_s": floor}
            ratio = floor / seconds
            yield Row(work.name, seconds * 1e6, "us", ratio, "of the floor's speed", work.at_least, facts=facts)

        yield work.name, measure


def _works(bench: Bench) -> Iterator[_Work]:
    yield from _attention(bench)
    yield from _linear(bench)
    yield from _quantized(bench)
    yield from _elementwise(bench)
    yield from _sampling(bench)
    yield from _memory(bench)


def _attention(bench: Bench) -> Iterator[_Work]:
    longest, count = max(bench.sizes.contexts), bench.sizes.prefill
    for batch in bench.sizes.batches:
        for context in bench.sizes.contexts:
            if batch * context * _kv_bytes(bench) <= _MOST_POOL_BYTES:
                yield _Work(
                    f"attention, decode, {batch} x {context}",
                    lambda batch=batch, context=context: _attend(bench, batch, context, 1),  # type: ignore[misc]
                    0.85 if (batch, context) == (_GOAL_BATCH, longest) else None,
                )
    yield _Work(f"attention, prompt of {count}", lambda: _attend(bench, 1, count, count))
    if bench.backend.has_float8:
        batch = min(_GOAL_BATCH, max(bench.sizes.batches))
        yield _Work(
            f"attention, decode, {batch} x {longest}, KV of e4m3", lambda: _attend(bench, batch, longest, 1, _E4M3)
        )


def _attend(bench: Bench, batch: int, context: int, queries: int, kv_dtype: torch.dtype | None = None) -> _Call:
    """Each sequence's last `queries` tokens, with all that they see. kv_dtype: of stored K and V, None for the
    model's."""
    model = bench.sizes.model
    case = paged_pass(bench, sequences=batch, context=context, queries=queries, kv_dtype=kv_dtype)
    pairs = queries * context - queries * (queries - 1) // 2
    return _Call(
        lambda: bench.backend.paged_attention(case.q, case.kv, case.batch, scale=case.scale),
        batch * context * _kv_bytes(bench, kv_dtype) + 2 * case.q.nbytes,
        4 * batch * pairs * model.num_heads * model.head_dim,
    )


def _kv_bytes(bench: Bench, kv_dtype: torch.dtype | None = None) -> int:
    """Of one token in one layer, scales included where it is stored in a dtype that has them."""
    model, dtype = bench.sizes.model, kv_dtype or bench.sizes.dtype
    return 2 * model.num_kv_heads * (model.head_dim * dtype.itemsize + (_SCALE_BYTES if kv_dtype else 0))


def _linear(bench: Bench) -> Iterator[_Work]:
    model = bench.sizes.model
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    shapes = {"qkv": (width, model.hidden_size), "gate and up": (2 * model.intermediate_size, model.hidden_size)}
    shapes["down"] = (model.hidden_size, model.intermediate_size)
    for name, (out, inputs) in shapes.items():
        for rows in (1, 64, bench.sizes.prefill):
            yield _Work(
                f"linear, {name}, {rows} rows",
                lambda out=out, inputs=inputs, rows=rows: _multiply(bench, out, inputs, rows),  # type: ignore[misc]
            )
    rows, hidden = min(_GOAL_BATCH, max(bench.sizes.batches)), model.hidden_size
    heads = model.num_heads * model.head_dim
    yield _Work(f"linear, output with residual, {rows} rows", lambda: _add_product(bench, hidden, heads, rows))
    yield _Work(f"linear, head, {rows} rows", lambda: _score(bench, rows))


def _multiply(bench: Bench, out: int, inputs: int, rows: int) -> _Call:
    # Several copies in turn, so that no weight is found in a cache.
    layers = [bench.backend.linear(bench.normal(out, inputs, scale=0.02, seed=seed)) for seed in range(4)]
    x = bench.normal(rows, inputs)

    def call() -> Tensor:
        layers.append(layers.pop(0))
        return layers[0](x)

    return _Call(call, (out * inputs + rows * (out + inputs)) * bench.sizes.dtype.itemsize, 2 * rows * out * inputs)


def _add_product(bench: Bench, out: int, inputs: int, rows: int) -> _Call:
    layers = [bench.backend.linear(bench.normal(out, inputs, scale=0.02, seed=seed)) for seed in range(4)]
    x, residual = bench.normal(rows, inputs), bench.normal(rows, out, seed=1)

    def call() -> Tensor:
        layers.append(layers.pop(0))
        return layers[0](x, residual)

    num_bytes = (out * inputs + rows * (2 * out + inputs)) * bench.sizes.dtype.itemsize
    return _Call(call, num_bytes, 2 * rows * out * inputs)


def _score(bench: Bench, rows: int) -> _Call:
    """The head, whose results are fp32 and whose weights are larger than a cache."""
    vocab, hidden = bench.sizes.model.vocab_size, bench.sizes.model.hidden_size
    layer = bench.backend.linear(bench.normal(vocab, hidden, scale=0.02), out_dtype=torch.float32)
    x = bench.normal(rows, hidden)
    num_bytes = (vocab * hidden + rows * hidden) * bench.sizes.dtype.itemsize + rows * vocab * 4
    return _Call(lambda: layer(x), num_bytes, 2 * rows * vocab * hidden)


def _quantized(bench: Bench) -> Iterator[_Work]:
    rows = min(_GOAL_BATCH, max(bench.sizes.batches))
    yield _Work(f"int8_linear, gate and up, {rows} rows", lambda: _multiply_int8(bench, rows))
    for name, make in quantized_layers(bench).items():
        for rows in (1, 64, bench.sizes.prefill):
            yield _Work(
                f"{name}, gate and up, {rows} rows",
                lambda make=make, rows=rows: _multiply_quantized(bench, make, rows),  # type: ignore[misc]
            )


def _multiply_int8(bench: Bench, rows: int) -> _Call:
    """Operations count as the model's dtype does them; units for 8 bits are faster."""
    out, inputs = 2 * bench.sizes.model.intermediate_size, bench.sizes.model.hidden_size
    layer = bench.backend.int8_linear(bench.normal(out, inputs, scale=0.02), dtype=bench.sizes.dtype)
    x = bench.normal(rows, inputs)
    num_bytes = out * (inputs + _SCALE_BYTES) + rows * (out + inputs) * bench.sizes.dtype.itemsize
    return _Call(lambda: layer(x), num_bytes, 2 * rows * out * inputs)


def _multiply_quantized(bench: Bench, make: MakeLayer, rows: int) -> _Call:
    out, inputs = 2 * bench.sizes.model.intermediate_size, bench.sizes.model.hidden_size
    made, x = make(bench, out, inputs), bench.normal(rows, inputs)
    num_bytes = made.weight_bytes + rows * (out + inputs) * bench.sizes.dtype.itemsize
    return _Call(lambda: made.layer(x), num_bytes, 2 * rows * out * inputs)


def _elementwise(bench: Bench) -> Iterator[_Work]:
    ops, model, rows = bench.backend, bench.sizes.model, bench.sizes.rows
    hidden, inner = model.hidden_size, model.intermediate_size

    def norm() -> _Call:
        x, gains = bench.normal(rows, hidden), bench.normal(hidden, seed=1)
        return _Call(lambda: ops.rms_norm(x, gains, 1e-5), 2 * x.nbytes)

    def activate() -> _Call:
        gate_up = bench.normal(rows, 2 * inner)
        return _Call(lambda: ops.silu_mul(gate_up), 1.5 * gate_up.nbytes)

    def rotate() -> _Call:
        prompt, cos_sin = _prompt(bench), bench.numbers(rows, model.head_dim)

        def call() -> Tensor:
            ops.rotary(prompt.q, prompt.batch.positions, cos_sin)
            return prompt.q

        return _Call(call, 2 * prompt.q.nbytes + cos_sin.nbytes)

    def write() -> _Call:
        prompt = _prompt(bench)

        def call() -> Tensor:
            ops.write_kv(prompt.k, prompt.v, prompt.kv, prompt.batch.slots)
            return prompt.k

        return _Call(call, 4 * prompt.k.nbytes)

    def rotate_and_write() -> _Call:
        prompt, cos_sin = _prompt(bench), bench.numbers(rows, model.head_dim)
        qkv = torch.cat([prompt.q, prompt.k, prompt.v], dim=1)
        batch = prompt.batch
        return _Call(
            lambda: ops.rotary_write_kv(qkv, batch.positions, cos_sin, prompt.kv, batch.slots),
            2 * qkv.nbytes + cos_sin.nbytes,
        )

    yield _Work(f"rms_norm, {rows} x {hidden}", norm)
    yield _Work(f"silu_mul, {rows} x {inner}", activate)
    yield _Work(f"rotary, {rows} tokens", rotate)
    yield _Work(f"write_kv, {rows} tokens", write)
    yield _Work(f"rotary_write_kv, {rows} tokens", rotate_and_write)


def _prompt(bench: Bench) -> Pass:
    return paged_pass(bench, sequences=1, context=bench.sizes.rows, queries=bench.sizes.rows)


def _sampling(bench: Bench) -> Iterator[_Work]:
    ops, device, rows = bench.backend, bench.device.torch_device, max(bench.sizes.batches)

    def sample() -> _Call:
        logits = bench.numbers(rows, bench.sizes.model.vocab_size) * 3
        temperatures, seeds = torch.ones(rows, device=device), torch.arange(rows, device=device)
        return _Call(lambda: ops.gumbel_argmax(logits, temperatures, seeds, seeds), logits.nbytes)

    def bound() -> _Call:
        logits, temperatures = bench.numbers(rows, bench.sizes.model.vocab_size) * 3, torch.ones(rows, device=device)
        top_k, min_p = torch.full((rows,), 50, device=device), torch.zeros(rows, device=device)
        top_p = torch.full((rows,), 0.9, device=device)
        return _Call(lambda: ops.least_kept(logits, temperatures, top_k, top_p, min_p), logits.nbytes)

    def ban() -> _Call:
        """All tokens, as a grammar bans nearly all."""
        vocab = bench.sizes.model.vocab_size
        logits, banned = bench.numbers(rows, vocab), torch.arange(rows, device=device)
        masks = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device=device)

        def call() -> Tensor:
            ops.ban_tokens(logits, banned, masks)
            return logits

        return _Call(call, masks.nbytes + logits.nbytes)

    yield _Work(f"ban_tokens, {rows} rows", ban)
    yield _Work(f"gumbel_argmax, {rows} rows", sample)
    yield _Work(f"least_kept, {rows} rows", bound)


def _memory(bench: Bench) -> Iterator[_Work]:
    sizes, device = bench.sizes, bench.device.torch_device
    layout = bench.backend.kv_layout(
        num_layers=sizes.model.num_layers,
        num_kv_heads=sizes.model.num_kv_heads,
        head_dim=sizes.model.head_dim,
        block_size=sizes.block_size,
        dtype=sizes.dtype,
    )
    count = max(1, sizes.copy_bytes // (4 * layout.bytes_per_block))
    lanes, num_blocks = max(sizes.batches), -(-max(sizes.contexts) // sizes.block_size)

    def copy() -> _Call:
        pool = torch.zeros(layout.pool_shape(2 * count), dtype=layout.pool_dtype, device=device)
        # Ids are on the device: bringing them there is no part of the kernel.
        order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0)).to(device)

        def call() -> Tensor:
            bench.backend.copy_blocks(pool, order[:count], order[count:])
            return pool

        return _Call(call, 2 * count * layout.bytes_per_block)

    def advance() -> _Call:
        """The blocks of the longest contexts, all of which the device knows."""
        rows = torch.arange(lanes, dtype=torch.int32, device=device)
        state = DecodeState(torch.zeros_like(rows), torch.zeros(lanes, num_blocks, dtype=torch.int32, device=device))
        inputs = DecodeInputs.empty(
            lanes, num_blocks, block_size=sizes.block_size, scratch_block=lanes * num_blocks, device=device
        )
        columns = DecodeColumns(
            rows=rows,
            positions=torch.full_like(rows, num_blocks * sizes.block_size - 1),
            token_ids=torch.full_like(rows, FROM_STATE),
            num_known=torch.full_like(rows, num_blocks),
            new_starts=torch.zeros(lanes + 1, dtype=torch.int32, device=device),
            new_blocks=torch.zeros(0, dtype=torch.int32, device=device),
        )

        def call() -> Tensor:
            bench.backend.advance_decode(state, columns, inputs)
            return inputs.token_ids

        return _Call(call, 2 * state.block_tables.nbytes + 9 * rows.nbytes)

    yield _Work(f"copy_blocks, {count} of {layout.bytes_per_block >> 10} KiB", copy)
    yield _Work(f"advance_decode, {lanes} x {num_blocks} blocks", advance)
