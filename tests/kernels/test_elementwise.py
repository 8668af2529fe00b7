"""Norms, rotary embedding, gated SiLU, cache writes and block moves: against the oracle and written-down values."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import InvalidArgumentError, KVLayout
from octavo_kernels.reference import runs
from tests.kernels.cases import DTYPES, ISAS, TOLERANCES, normal


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 15), (13, 100), (70, 576), (0, 16)])
def test_rms_norm(native, reference, isa, dtype, rows, n):
    backend = native(isa)
    x, weight = normal(rows, n, dtype=dtype, seed=1, scale=3), normal(n, dtype=dtype, seed=2)
    atol, rtol = TOLERANCES[dtype]
    out = backend.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), atol=atol, rtol=rtol)
    widened = backend.rms_norm(x, weight.float() + 1, 1e-5)
    torch.testing.assert_close(widened, reference.rms_norm(x, weight.float() + 1, 1e-5), atol=atol, rtol=rtol)
    for i in range(rows):
        assert torch.equal(backend.rms_norm(x[i : i + 1], weight, 1e-5)[0], out[i])


def test_rms_norm_of_strided_heads(native):
    backend = native()
    wide = normal(5, 300, dtype=torch.float32, seed=1)
    weight = normal(24, dtype=torch.float32, seed=2)
    heads = wide[:, 60:180].unflatten(1, (5, 24))
    out = backend.rms_norm(heads, weight, 1e-6)
    assert out.shape == (5, 5, 24)
    assert out.is_contiguous()
    assert torch.equal(out, backend.rms_norm(heads.contiguous(), weight, 1e-6))


def test_rms_norm_written_down(native):
    out = native().rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[0.84852814, 11.3137085]]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (40, 36), (8, 2), (128, 64), (100, 100)])
def test_rotary(native, reference, isa, dtype, head_dim, rotary_dim):
    backend = native(isa)
    angles = normal(50, rotary_dim // 2, dtype=torch.float32, seed=1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (13,), generator=torch.Generator().manual_seed(2)).int()
    wide = normal(13, 5 * head_dim + 7, dtype=dtype, seed=3)
    before = wide.clone()
    expected = wide[:, 7:].unflatten(1, (5, head_dim)).clone()
    reference.rotary(expected, positions, cos_sin)
    backend.rotary(wide[:, 7:].unflatten(1, (5, head_dim)), positions, cos_sin)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(wide[:, 7:].unflatten(1, (5, head_dim)), expected, atol=atol, rtol=rtol)
    assert torch.equal(wide[:, :7], before[:, :7])
    untouched = slice(7 + rotary_dim, 7 + head_dim)
    assert torch.equal(wide[:, untouched], before[:, untouched])


def test_rotary_turns_pairs_half_a_head_apart(native, reference):
    for backend in (native(), reference):
        x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        # A quarter turn for the pair (0, 2), none for (1, 3).
        backend.rotary(x, torch.tensor([1]).int(), torch.tensor([[9.0] * 4, [0.0, 1.0, 1.0, 0.0]]))
        assert x.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_rotary_refuses(native, reference):
    for backend in (native(), reference):
        with pytest.raises(InvalidArgumentError, match="position 5"):
            backend.rotary(torch.ones(1, 1, 4), torch.tensor([5]).int(), torch.ones(5, 4))
        with pytest.raises(InvalidArgumentError, match="rotary_dim is 6"):
            backend.rotary(torch.ones(1, 1, 4), torch.tensor([0]).int(), torch.ones(5, 6))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 15), (70, 1536), (0, 4)])
def test_silu_mul(native, reference, isa, dtype, rows, n):
    gate_up = normal(rows, 2 * n, dtype=dtype, seed=1, scale=4)
    atol, rtol = TOLERANCES[dtype]
    out = native(isa).silu_mul(gate_up)
    torch.testing.assert_close(out, reference.silu_mul(gate_up), atol=atol, rtol=rtol)


@pytest.mark.parametrize("isa", ISAS)
def test_silu_mul_at_the_ends(native, isa):
    gate = torch.tensor([-200.0, -100.0, -20.0, 0.0, 20.0, 200.0, float("nan"), float("inf")])
    out = native(isa).silu_mul(torch.cat((gate, torch.ones(8)))[None])[0]
    expected = [0.0, 0.0, -20 / (1 + 485165195.41), 0.0, 20.0, 200.0, float("nan"), float("inf")]
    torch.testing.assert_close(out, torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_write_kv(native, reference, dtype, block_size):
    layout = KVLayout(3, 2, 20, block_size, dtype)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(1))[:33].int()
    qkv = normal(33, 120, dtype=dtype, seed=2)
    k, v = qkv[:, 40:80].unflatten(1, (2, 20)), qkv[:, 80:].unflatten(1, (2, 20))
    pools = []
    for backend in (native(), reference):
        pool = torch.zeros(layout.pool_shape(5), dtype=dtype)
        backend.write_kv(k, v, layout.layer(pool, 1), slots)
        pools.append(pool)
    assert torch.equal(*pools)
    block, offset = int(slots[0]) // block_size, int(slots[0]) % block_size
    written = layout.layer(pools[0], 1)
    assert torch.equal(written.k[block, :, :, offset], k[0])
    assert torch.equal(written.v[block, :, offset], v[0])
    assert pools[0][:, ::2].count_nonzero() == 0


def test_write_kv_refuses(native, reference):
    layout = KVLayout(1, 2, 8, 16, torch.float32)
    kv = layout.layer(torch.zeros(layout.pool_shape(2)), 0)
    for backend in (native(), reference):
        for slot in (-1, 32):
            with pytest.raises(InvalidArgumentError, match=f"slot {slot}"):
                backend.write_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), kv, torch.tensor([slot]).int())
    odd = KVLayout(1, 2, 8, 12, torch.float32)
    with pytest.raises(InvalidArgumentError, match="block_size is 12"):
        native().write_kv(
            torch.ones(1, 2, 8),
            torch.ones(1, 2, 8),
            odd.layer(torch.zeros(odd.pool_shape(2)), 0),
            torch.tensor([0]).int(),
        )


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_write_kv_is_the_ops_one_by_one(native, reference, normed):
    layout = KVLayout(2, 2, 16, 8, torch.float32)
    angles = normal(50, 8, dtype=torch.float32, seed=1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.arange(5).int() * 7, torch.tensor([3, 17, 4, 30, 9]).int()
    norms = (normal(16, dtype=torch.float32, seed=2), normal(16, dtype=torch.float32, seed=3)) if normed else None
    for backend in (native(), reference):
        qkv = normal(5, 7, 16, dtype=torch.float32, seed=4)
        q, k, v = (x.contiguous() for x in qkv.split((3, 2, 2), dim=1))
        if norms is not None:
            q, k = backend.rms_norm(q, norms[0], 1e-5), backend.rms_norm(k, norms[1], 1e-5)
        backend.rotary(q, positions, cos_sin)
        backend.rotary(k, positions, cos_sin)
        pools = [torch.zeros(layout.pool_shape(4)) for _ in range(2)]
        backend.write_kv(k, v, layout.layer(pools[0], 1), slots)
        out = backend.rotary_write_kv(qkv, positions, cos_sin, layout.layer(pools[1], 1), slots, norms=norms, eps=1e-5)
        assert torch.equal(out, q)
        assert torch.equal(*pools)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 40])
def test_blocks_are_copied_and_moved(native, reference, dtype, heads):
    layout = KVLayout(2, heads, 32, 16, dtype)
    source, empty = normal(*layout.pool_shape(9), dtype=dtype), torch.zeros(layout.pool_shape(4), dtype=dtype)
    for backend in (native(), reference):
        pool = source.clone()
        backend.copy_blocks(pool, torch.tensor([1, 1, 8]), torch.tensor([0, 5, 2]))
        assert torch.equal(pool, source[[1, 1, 8, 3, 4, 1, 6, 7, 8]])
        target = empty.clone()
        backend.move_blocks(source, torch.tensor([7, 2]), target, torch.tensor([3, 0]))
        assert torch.equal(target, torch.stack((source[2], empty[0], empty[0], source[7])))
        backend.copy_blocks(pool, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
        with pytest.raises(InvalidArgumentError, match="source block 9"):
            backend.copy_blocks(pool, torch.tensor([9]), torch.tensor([0]))
        with pytest.raises(InvalidArgumentError, match="target block -1"):
            backend.copy_blocks(pool, torch.tensor([0]), torch.tensor([-1]))


def test_moves_between_devices_are_one_copy_a_stretch():
    assert list(runs([3, 4, 5, 7, 8, 2], [0, 1, 2, 3, 5, 6])) == [(3, 0, 3), (7, 3, 1), (8, 5, 1), (2, 6, 1)]
    assert list(runs([9], [1])) == [(9, 1, 1)]
    assert list(runs([], [])) == []
