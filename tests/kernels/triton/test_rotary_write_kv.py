"""The pass between projections and attention in Triton: what the ops give one by one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton.paged_kv import kv_layout
from octavo_kernels.triton.rms_norm import rms_norm
from octavo_kernels.triton.rotary import rotary
from octavo_kernels.triton.rotary_write_kv import rotary_write_kv
from octavo_kernels.triton.write_kv import write_kv
from tests.kernels.cases import TOLERANCES, normal

STORED = [None, torch.int8, torch.float8_e4m3fn]


def inputs(tokens, heads, kv_heads, head_dim, rotary_dim, dtype, stored):
    layout = kv_layout(2, kv_heads, head_dim, 8, stored or dtype)
    pool = torch.zeros(layout.pool_shape(5), dtype=layout.pool_dtype)
    wide = normal(tokens, (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype, seed=1)
    qkv = wide[:, 3:].unflatten(1, (heads + 2 * kv_heads, head_dim))
    generator = torch.Generator().manual_seed(2)
    slots = torch.randperm(40, generator=generator)[:tokens].int()
    positions = torch.randint(0, 50, (tokens,), generator=generator).int()
    angles = normal(50, rotary_dim // 2, dtype=torch.float32, seed=3)
    return pool, layout, qkv, slots, positions, torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (20, 12)])
def test_is_the_ops_one_by_one(reference, dtype, stored, normed, head_dim, rotary_dim):
    pool, layout, qkv, slots, positions, cos_sin = inputs(19, 4, 2, head_dim, rotary_dim, dtype, stored)
    norms = (normal(head_dim, dtype=dtype, seed=4), normal(head_dim, dtype=dtype, seed=5)) if normed else None
    before = qkv.clone()
    q = rotary_write_kv(qkv, positions, cos_sin, layout.layer(pool, 1), slots, norms=norms, eps=1e-5)
    assert torch.equal(qkv, before)
    assert q.is_contiguous()

    expected_q, k, v = (x.contiguous() for x in before.split((4, 2, 2), dim=1))
    if norms is not None:
        expected_q, k = rms_norm(expected_q, norms[0], 1e-5), rms_norm(k, norms[1], 1e-5)
    rotary(expected_q, positions, cos_sin)
    rotary(k, positions, cos_sin)
    expected_pool = torch.zeros_like(pool)
    write_kv(k, v, layout.layer(expected_pool, 1), slots)
    assert torch.equal(q, expected_q)
    assert torch.equal(pool, expected_pool)

    plain = torch.zeros_like(pool)
    reference_q = reference.rotary_write_kv(
        before, positions, cos_sin, layout.layer(plain, 1), slots, norms=norms, eps=1e-5
    )
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(q, reference_q, atol=atol, rtol=rtol)
    if stored is None:
        torch.testing.assert_close(pool, plain, atol=atol, rtol=rtol)


def test_slots_outside_of_the_pool_are_not_written():
    pool, layout, qkv, slots, positions, cos_sin = inputs(5, 4, 2, 16, 16, torch.float32, None)
    room = torch.zeros((9, *pool.shape[1:]), dtype=pool.dtype)
    expected = torch.zeros_like(room)
    kept = torch.tensor([True, False, True, False, True])
    rotary_write_kv(qkv[kept], positions[kept], cos_sin, layout.layer(expected[2:7], 1), slots[kept])
    slots[1], slots[3] = -1, 40
    rotary_write_kv(qkv, positions, cos_sin, layout.layer(room[2:7], 1), slots)
    assert torch.equal(room, expected)


def test_no_tokens():
    pool, layout, qkv, slots, positions, cos_sin = inputs(0, 4, 2, 16, 16, torch.float32, None)
    q = rotary_write_kv(qkv, positions, cos_sin, layout.layer(pool, 1), slots)
    assert q.shape == (0, 4, 16)


def test_refuses():
    pool, layout, qkv, slots, positions, cos_sin = inputs(3, 4, 2, 16, 16, torch.float32, None)
    kv = layout.layer(pool, 1)
    for wrong in (qkv[:, :4], qkv[..., :8], qkv[:, ::2], qkv.flatten(1)):
        with pytest.raises(InvalidArgumentError, match="qkv has shape"):
            rotary_write_kv(wrong, positions, cos_sin, kv, slots)
    with pytest.raises(InvalidArgumentError, match=r"torch\.float32, the dtype of K and V"):
        rotary_write_kv(qkv.half(), positions, cos_sin, kv, slots)
    with pytest.raises(InvalidArgumentError, match="slots has shape"):
        rotary_write_kv(qkv, positions, cos_sin, kv, slots.long())
    with pytest.raises(InvalidArgumentError, match="norms has shape"):
        rotary_write_kv(qkv, positions, cos_sin, kv, slots, norms=(torch.ones(8), torch.ones(16)))
