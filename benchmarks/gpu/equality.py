"""Every kernel against the oracle, on the device, at the model's widths and in its dtype.

A case makes its own inputs when its turn has come: inputs that fail are that case's failure alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu.attention import Pass, paged_pass
from gpu.bench import Bench
from gpu.quantized import MakeLayer, quantized_layers
from gpu.rows import ORACLE, Row
from octavo_kernels import Backend
from octavo_kernels.decode_state import FROM_STATE, PADDING, DecodeColumns, DecodeInputs, DecodeState

# Largest difference, absolute and relative to the largest magnitude: a rounding or two of the dtype.
_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Where a mass meets its share within rounding, the bound may be the next token's logit, which is very near.
_FILTER_LIMIT = 1e-3
_E4M3 = torch.float8_e4m3fn
_OTHER_HEADS = (64, 80, 96, 256)  # heads of other models than the one that is measured
_Op = Callable[[Backend], Tensor]


@dataclass(frozen=True)
class _Case:
    """make: gives what an op computes on a backend; limit: the most that it may be off, None for what is usual with the
    dtype."""

    name: str
    make: Callable[[], _Op]
    limit: float | None = None


def equality_cases(bench: Bench) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """A case for each op: the largest difference over the largest magnitude, beside what is allowed."""
    dtype = str(bench.sizes.dtype).removeprefix("torch.")
    for case in _cases(bench):
        limit = _TOLERANCES[bench.sizes.dtype] if case.limit is None else case.limit

        def measure(case: _Case = case, name: str = f"{case.name}, {dtype}", limit: float = limit) -> Iterator[Row]:
            op = case.make()
            relative = difference(op(bench.backend).float(), op(bench.reference).float())
            verdict = "equal" if relative <= limit else "NOT EQUAL"
            yield Row(f"{name}: {verdict}", relative, "of the largest", relative, ORACLE, at_most=limit)
            if relative > limit:
                raise ValueError(f"{relative:.3g} of the largest magnitude off, {limit:g} is allowed")

        yield f"{case.name}, {dtype}", measure


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, by the largest magnitude; infinite where one has a number and the other has none. Raises
    ValueError where they are not of one shape."""
    if found.shape != expected.shape:
        raise ValueError(f"the result is {tuple(found.shape)}, the oracle's {tuple(expected.shape)}")
    largest = expected[expected.isfinite()].abs().max().item()
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (found - expected).abs()).nan_to_num(nan=torch.inf).max().item()
    return off / max(largest, 1e-9)


def _cases(bench: Bench) -> list[_Case]:
    return [*_dense(bench), *_quantized(bench), *_paged(bench), *_written(bench), *_sampling(bench), *_memory(bench)]


def _is_exact(bench: Bench) -> bool:
    """Whether it computes in fp32: what stores 4 or 8 bits is not asked for there, and takes a compiler very long."""
    return bench.sizes.dtype is torch.float32


def _dense(bench: Bench) -> list[_Case]:
    model, rows, device = bench.sizes.model, min(bench.sizes.rows, 300), bench.device.torch_device
    hidden, inner = model.hidden_size, model.intermediate_size

    def norm() -> _Op:
        x, gains = bench.normal(rows, hidden), bench.normal(hidden, seed=5)
        return lambda backend: backend.rms_norm(x, gains, 1e-5)

    def activate() -> _Op:
        gate_up = bench.normal(rows, 2 * inner, seed=2)
        return lambda backend: backend.silu_mul(gate_up)

    def rotate() -> _Op:
        heads, cos_sin = bench.normal(rows, model.num_heads, model.head_dim, seed=6), bench.numbers(64, model.head_dim)
        positions = (torch.arange(rows, device=device) % 64).int()

        def op(backend: Backend) -> Tensor:
            mine = heads.clone()
            backend.rotary(mine, positions, cos_sin)
            return mine

        return op

    def multiply() -> _Op:
        x, weight = bench.normal(rows, hidden), bench.normal(inner, hidden, scale=0.02, seed=3)
        return lambda backend: backend.linear(weight)(x)

    def add_product() -> _Op:
        x, residual = bench.normal(rows, hidden), bench.normal(rows, hidden, seed=1)
        weight = bench.normal(hidden, hidden, scale=0.02, seed=4)
        return lambda backend: backend.linear(weight)(x, residual.clone())

    def multiply_int8() -> _Op:
        x, weight = bench.normal(rows, hidden), bench.normal(inner, hidden, scale=0.02, seed=3)
        return lambda backend: backend.int8_linear(weight, dtype=bench.sizes.dtype)(x)

    return [
        _Case("rms_norm", norm),
        _Case("silu_mul", activate),
        _Case("rotary", rotate),
        _Case("linear", multiply),
        _Case("linear with residual", add_product),
        _Case("int8_linear", multiply_int8),
    ]


def _quantized(bench: Bench) -> list[_Case]:
    def compute(make: MakeLayer, rows: int) -> _Op:
        made = make(bench, bench.sizes.model.intermediate_size, bench.sizes.model.hidden_size)
        x = bench.normal(rows, bench.sizes.model.hidden_size, seed=9)
        return lambda backend: made.oracle(x) if backend is bench.reference else made.layer(x)

    return [
        _Case(f"{name}, {rows} rows", lambda make=make, rows=rows: compute(make, rows))  # type: ignore[misc]
        for name, make in quantized_layers(bench).items()
        for rows in (1, 40, 300)
        if not _is_exact(bench)
    ]


def _paged(bench: Bench) -> list[_Case]:
    few, many = min(bench.sizes.contexts), max(bench.sizes.contexts)

    def attend(shape: dict[str, Any], options: dict[str, Any]) -> _Op:
        mine = _with_heads(bench, shape.pop("head_dim", bench.sizes.model.head_dim))
        case = paged_pass(mine, **shape)
        if "sinks" in options:
            options = {**options, "sinks": bench.numbers(bench.sizes.model.num_heads)}
        return lambda backend: backend.paged_attention(case.q, case.kv, case.batch, scale=case.scale, **options)

    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("decode", {"sequences": 5, "context": few + 3, "queries": 1}, {}),
        ("decode, long", {"sequences": 1, "context": many, "queries": 1}, {}),
        ("decode, KV of e4m3", {"sequences": 3, "context": few, "queries": 1, "kv_dtype": _E4M3}, {}),
        ("decode, cap and sinks", {"sequences": 3, "context": few, "queries": 1}, {"soft_cap": 20.0, "sinks": ...}),
        ("prompt", {"sequences": 1, "context": few, "queries": few}, {}),
        ("prompt, KV of e4m3", {"sequences": 1, "context": few, "queries": few, "kv_dtype": _E4M3}, {}),
        ("chunks", {"sequences": 3, "context": few + 5, "queries": 7}, {}),
        ("chunks, window", {"sequences": 2, "context": few, "queries": 9}, {"sliding_window": 11}),
    ]
    if bench.sizes.dtype is torch.bfloat16:
        everything = {"sliding_window": 11, "soft_cap": 20.0, "sinks": ...}
        for head_dim in _OTHER_HEADS:
            shape = {"sequences": 3, "context": few + 3, "head_dim": head_dim}
            cases.append((f"decode, heads of {head_dim}", {**shape, "queries": 1}, everything))
            cases.append((f"chunks, heads of {head_dim}", {**shape, "queries": 7}, everything))
    return [
        _Case(f"attention, {name}", lambda shape=shape, options=options: attend(dict(shape), options))  # type: ignore[misc]
        for name, shape, options in cases
        if not (_is_exact(bench) and "kv_dtype" in shape)
    ]


def _with_heads(bench: Bench, head_dim: int) -> Bench:
    """The same with heads of another size."""
    model = dataclasses.replace(bench.sizes.model, head_dim=head_dim)
    return dataclasses.replace(bench, sizes=dataclasses.replace(bench.sizes, model=model))


def _written(bench: Bench) -> list[_Case]:
    context, model = min(bench.sizes.contexts), bench.sizes.model

    def zeros(kv_dtype: torch.dtype | None) -> Pass:
        case = paged_pass(bench, sequences=3, context=context, queries=7, kv_dtype=kv_dtype)
        _stored(case)
        return case

    def write(kv_dtype: torch.dtype | None) -> _Op:
        case = zeros(kv_dtype)

        def op(backend: Backend) -> Tensor:
            backend.write_kv(case.k, case.v, case.kv, case.batch.slots)
            return _stored(case)

        return op

    def rotate_and_write() -> _Op:
        case, cos_sin = zeros(None), bench.numbers(context, model.head_dim)
        norms = (bench.normal(model.head_dim, seed=1), bench.normal(model.head_dim, seed=2))

        def op(backend: Backend) -> Tensor:
            qkv = torch.cat([case.q, case.k, case.v], dim=1)
            q = backend.rotary_write_kv(
                qkv, case.batch.positions, cos_sin, case.kv, case.batch.slots, norms=norms, eps=1e-5
            )
            return torch.cat([q.flatten().float(), _stored(case)])

        return op

    return [
        _Case("write_kv", lambda: write(None), 0.0),
        # Not with stored e4m3: there a value on the edge between two may fall to either side.
        _Case("rotary_write_kv", rotate_and_write),
        _Case("write_kv, KV of e4m3", lambda: write(_E4M3), 0.0),
    ]


def _stored(case: Pass) -> Tensor:
    """What the layer holds, as fp32; it holds zeros afterwards."""
    parts = [part for part in (case.kv.k, case.kv.v, case.kv.k_scales, case.kv.v_scales) if part is not None]
    stored = torch.cat([part.float().flatten() for part in parts])
    for part in parts:
        part.zero_()
    return stored


def _sampling(bench: Bench) -> list[_Case]:
    device, vocab, rows = bench.device.torch_device, bench.sizes.model.vocab_size, 9

    def logits_and_temperatures() -> tuple[Tensor, Tensor]:
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(7)).to(device) * 3
        return logits, (torch.arange(rows) * 0.2).to(device)

    def sample() -> _Op:
        logits, temperatures = logits_and_temperatures()
        seeds, positions = torch.arange(rows, device=device) * 1_000_003, torch.arange(rows, device=device) + 5
        return lambda backend: backend.gumbel_argmax(logits, temperatures, seeds, positions)

    def bound(top_p: list[float], min_p: list[float]) -> _Op:
        logits, temperatures = logits_and_temperatures()
        columns = (torch.tensor([0, 5, 0, 50, 0, 1, 7, 0, 3]), torch.tensor(top_p), torch.tensor(min_p))
        top_k, *shares = (column.to(device) for column in columns)
        return lambda backend: backend.least_kept(logits, temperatures, top_k, *shares).nan_to_num(neginf=-9.0)

    def ban() -> _Op:
        logits, _ = logits_and_temperatures()
        generator = torch.Generator().manual_seed(8)
        masks = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab // 32)), generator=generator).int().to(device)

        def op(backend: Backend) -> Tensor:
            mine = logits.clone()
            backend.ban_tokens(mine, torch.tensor([1, 4], device=device), masks)
            return mine.nan_to_num(neginf=-9.0)

        return op

    shares = [1.0, 1.0, 0.5, 0.9, 1.0, 1.0, 0.3, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.1]
    return [
        _Case("gumbel_argmax", sample, 0.0),
        _Case("least_kept", lambda: bound(*shares), _FILTER_LIMIT),
        _Case("least_kept, top-k alone", lambda: bound([1.0] * rows, [0.0] * rows), 0.0),
        _Case("ban_tokens", ban, 0.0),
    ]


def _memory(bench: Bench) -> list[_Case]:
    device = bench.device.torch_device

    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def copy() -> _Op:
        pool = bench.normal(12, 4096, seed=8).view(12, 2, 2, 8, 128)
        sources, targets = torch.tensor([3, 1, 7]), torch.tensor([4, 0, 9])

        def op(backend: Backend) -> Tensor:
            mine = pool.clone()
            backend.copy_blocks(mine, sources, targets)
            return mine

        return op

    def advance(backend: Backend) -> Tensor:
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

    return [_Case("copy_blocks", copy, 0.0), _Case("advance_decode", lambda: advance, 0.0)]
