"""Every kernel against the oracle, on the device, at the model's widths and in its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpu.attention import Pass, paged_pass
from gpu.bench import Bench
from gpu.quantized import QuantizedLayer, quantized_layers
from gpu.rows import Row
from octavo_kernels import Backend
from octavo_kernels.decode_state import FROM_STATE, PADDING, DecodeColumns, DecodeInputs, DecodeState

# Largest difference, absolute and relative to the largest magnitude: a rounding or two of the dtype.
_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_Op = Callable[[Backend], Tensor]
_Case = tuple[str, _Op, float | None]


def equality_cases(bench: Bench) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """A case for each op: the largest difference over the largest magnitude, beside what is allowed."""
    dtype = str(bench.sizes.dtype).removeprefix("torch.")
    usual = _TOLERANCES[bench.sizes.dtype]
    for name, op, own in _cases(bench):
        limit = usual if own is None else own

        def measure(name: str = f"{name}, {dtype}", op: _Op = op, limit: float = limit) -> Iterator[Row]:
            relative = _difference(op(bench.backend).float(), op(bench.reference).float())
            verdict = "equal" if relative <= limit else "NOT EQUAL"
            yield Row(f"{name}: {verdict}", relative, "of the largest", None, "the oracle", f"{limit:g} or less")
            if relative > limit:
                raise ValueError(f"{relative:.3g} of the largest magnitude off, {limit:g} is allowed")

        yield f"{name}, {dtype}", measure


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, by the largest magnitude; infinite where one has a number and the other has none."""
    largest = expected[expected.isfinite()].abs().max().item()
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (found - expected).abs()).nan_to_num(nan=torch.inf).max().item()
    return difference / max(largest, 1e-9)


def _cases(bench: Bench) -> list[_Case]:
    """(name, what an op gives on a backend, the most that it may be off, None for what is usual with the dtype)."""
    return [*_dense(bench), *_quantized(bench), *_paged(bench), *_written(bench), *_sampling(bench), *_memory(bench)]


def _dense(bench: Bench) -> list[_Case]:
    model, rows = bench.sizes.model, min(bench.sizes.rows, 300)
    x, residual = bench.normal(rows, model.hidden_size), bench.normal(rows, model.hidden_size, seed=1)
    gate_up = bench.normal(rows, 2 * model.intermediate_size, seed=2)
    weight = bench.normal(model.intermediate_size, model.hidden_size, scale=0.02, seed=3)
    down = bench.normal(model.hidden_size, model.hidden_size, scale=0.02, seed=4)
    gains = bench.normal(model.hidden_size, seed=5)
    cos_sin = torch.randn(64, model.head_dim, device=bench.device.torch_device)
    heads = bench.normal(rows, model.num_heads, model.head_dim, seed=6)
    positions = (torch.arange(rows, device=bench.device.torch_device) % 64).int()

    def rotated(backend: Backend) -> Tensor:
        mine = heads.clone()
        backend.rotary(mine, positions, cos_sin)
        return mine

    return [
        ("rms_norm", lambda backend: backend.rms_norm(x, gains, 1e-5), None),
        ("silu_mul", lambda backend: backend.silu_mul(gate_up), None),
        ("rotary", rotated, None),
        ("linear", lambda backend: backend.linear(weight)(x), None),
        ("linear with residual", lambda backend: backend.linear(down)(x, residual.clone()), None),
        ("int8_linear", lambda backend: backend.int8_linear(weight, dtype=bench.sizes.dtype)(x), None),
    ]


def _quantized(bench: Bench) -> list[_Case]:
    model, cases = bench.sizes.model, []
    for rows in (1, 40, 300):
        x = bench.normal(rows, model.hidden_size, seed=9)
        for made in quantized_layers(bench, model.intermediate_size, model.hidden_size):

            def compute(backend: Backend, made: QuantizedLayer = made, x: Tensor = x) -> Tensor:
                return made.oracle(x) if backend is bench.reference else made.layer(x)

            cases.append((f"{made.name}, {rows} rows", compute, max(made.limit, _TOLERANCES[bench.sizes.dtype])))
    return cases


def _paged(bench: Bench) -> list[_Case]:
    few, many = min(bench.sizes.contexts), max(bench.sizes.contexts)
    sinks = torch.randn(bench.sizes.model.num_heads, device=bench.device.torch_device)
    e4m3 = torch.float8_e4m3fn
    cases: list[tuple[str, Pass, dict[str, Any]]] = [
        ("decode", paged_pass(bench, sequences=5, context=few + 3, queries=1), {}),
        ("decode, long", paged_pass(bench, sequences=1, context=many, queries=1), {}),
        ("decode, KV of e4m3", paged_pass(bench, sequences=3, context=few, queries=1, kv_dtype=e4m3), {}),
        ("decode, cap and sinks", paged_pass(bench, sequences=3, context=few, queries=1),
         {"soft_cap": 20.0, "sinks": sinks}),
        ("prompt", paged_pass(bench, sequences=1, context=few, queries=few), {}),
        ("prompt, KV of e4m3", paged_pass(bench, sequences=1, context=few, queries=few, kv_dtype=e4m3), {}),
        ("chunks", paged_pass(bench, sequences=3, context=few + 5, queries=7), {}),
        ("chunks, window", paged_pass(bench, sequences=2, context=few, queries=9), {"sliding_window": 11}),
    ]  # fmt: skip
    ops: list[_Case] = []
    for name, case, options in cases:

        def attend(backend: Backend, case: Pass = case, options: dict[str, Any] = options) -> Tensor:
            return backend.paged_attention(case.q, case.kv, case.batch, scale=case.scale, **options)

        ops.append((f"attention, {name}", attend, None))
    return ops


def _written(bench: Bench) -> list[_Case]:
    context, model = min(bench.sizes.contexts), bench.sizes.model
    cos_sin = torch.randn(context, model.head_dim, device=bench.device.torch_device)
    norms = (bench.normal(model.head_dim, seed=1), bench.normal(model.head_dim, seed=2))
    ops: list[_Case] = []
    for name, dtype in (("", None), (", KV of e4m3", torch.float8_e4m3fn)):
        case = paged_pass(bench, sequences=3, context=context, queries=7, kv_dtype=dtype)

        def write(backend: Backend, case: Pass = case) -> Tensor:
            backend.write_kv(case.k, case.v, case.kv, case.batch.slots)
            return _stored(case)

        def rotate_and_write(backend: Backend, case: Pass = case) -> Tensor:
            qkv = torch.cat([case.q, case.k, case.v], dim=1)
            q = backend.rotary_write_kv(
                qkv, case.batch.positions, cos_sin, case.kv, case.batch.slots, norms=norms, eps=1e-5
            )
            return torch.cat([q.flatten().float(), _stored(case)])

        write(bench.reference)  # from here on both write into zeros
        ops.append((f"write_kv{name}", write, 0.0))
        if dtype is None:  # a value on the edge between two stored ones may fall to either side
            ops.append((f"rotary_write_kv{name}", rotate_and_write, None))
    return ops


def _stored(case: Pass) -> Tensor:
    """What the layer holds, as fp32; it holds zeros afterwards."""
    parts = [part for part in (case.kv.k, case.kv.v, case.kv.k_scales, case.kv.v_scales) if part is not None]
    stored = torch.cat([part.float().flatten() for part in parts])
    for part in parts:
        part.zero_()
    return stored


def _sampling(bench: Bench) -> list[_Case]:
    device, vocab, rows = bench.device.torch_device, bench.sizes.model.vocab_size, 9
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(7)).to(device) * 3
    temperatures = (torch.arange(rows) * 0.2).to(device)
    seeds, positions = torch.arange(rows, device=device) * 1_000_003, torch.arange(rows, device=device) + 5
    top_k = torch.tensor([0, 5, 0, 50, 0, 1, 7, 0, 3], device=device)
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.9, 1.0, 1.0, 0.3, 1.0, 1.0], device=device)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.1], device=device)
    masks = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab // 32)), dtype=torch.int64).int().to(device)

    def banned(backend: Backend) -> Tensor:
        mine = logits.clone()
        backend.ban_tokens(mine, torch.tensor([1, 4], device=device), masks)
        return mine.nan_to_num(neginf=-9.0)

    return [
        ("gumbel_argmax", lambda backend: backend.gumbel_argmax(logits, temperatures, seeds, positions), 0.0),
        (
            "least_kept",
            lambda backend: backend.least_kept(logits, temperatures, top_k, top_p, min_p).nan_to_num(neginf=-9.0),
            True,
        ),
        ("ban_tokens", banned, 0.0),
    ]


def _memory(bench: Bench) -> list[_Case]:
    device = bench.device.torch_device
    pool = bench.normal(12, 4096, seed=8).view(12, 2, 2, 8, 128)
    sources, targets = torch.tensor([3, 1, 7]), torch.tensor([4, 0, 9])

    def copied(backend: Backend) -> Tensor:
        mine = pool.clone()
        backend.copy_blocks(mine, sources, targets)
        return mine

    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def advanced(backend: Backend) -> Tensor:
        state = DecodeState(column(70, 71, 72), column(1, 2, 0, 3, 0, 0, 4, 5, 0).view(3, 3).clone())
        inputs = DecodeInputs.empty(4, 3, block_size=8, scratch_block=30, device=device)
        columns = DecodeColumns(
            rows=column(2, 0, 1, PADDING),
            positions=column(16, 10, 3, 0),
            token_ids=column(FROM_STATE, 50, FROM_STATE, 0),
            num_known=column(2, 2, 0, 0),
            new_starts=column(0, 1, 1, 2, 2),
            new_blocks=column(6, 7),
        )
        backend.advance_decode(state, columns, inputs)
        parts = (inputs.token_ids, inputs.positions, inputs.slots, inputs.context_lens, inputs.block_tables)
        return torch.cat([state.block_tables.flatten(), *(part.flatten() for part in parts)])

    return [("copy_blocks", copied, 0.0), ("advance_decode", advanced, 0.0)]
