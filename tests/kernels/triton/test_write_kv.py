"""Cache writes: the same bits as the oracle's, in every dtype and layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo_kernels.reference import ReferenceBackend
from octavo_kernels.triton.paged_kv import kv_layout
from octavo_kernels.triton.write_kv import write_kv


def pools(layout):
    pool = torch.zeros(layout.pool_shape(7), dtype=layout.pool_dtype)
    return layout.layer(pool, 1), pool


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_stores_the_oracles_bits(head_dim, dtype, stored, block_size):
    layout = kv_layout(2, 3, head_dim, block_size, stored or dtype)
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(37, 5 * head_dim * 3, generator=generator).to(dtype)
    qkv[3] *= 100
    qkv[4] *= 1e-4
    if stored is not None:
        qkv[5, 2 * head_dim * 3 + 1] = float("nan")
        qkv[6, 3 * head_dim * 3 + 5] = float("inf")
        qkv[7] = 0
    k, v = (qkv[:, i * head_dim * 3 : (i + 1) * head_dim * 3].unflatten(1, (3, head_dim)) for i in (2, 3))
    slots = torch.randperm(7 * block_size, generator=generator)[:37].int()
    (kv, pool), (expected_kv, expected) = pools(layout), pools(layout)
    write_kv(k, v, kv, slots)
    ReferenceBackend().write_kv(k, v, expected_kv, slots)
    if stored is not None:
        scales = kv.k_scales[slots.long() // block_size, :, slots.long() % block_size]
        assert scales[5, 0].isnan()
        assert (scales[7] == 0).all()
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("transposed", [(True, False), (True, True)])
def test_layouts(transposed):
    layout = replace(kv_layout(2, 2, 64, 16, torch.float32), k_transposed=transposed[0], v_transposed=transposed[1])
    k, v = torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    slots = torch.arange(16, 36).int()
    (kv, pool), (expected_kv, expected) = pools(layout), pools(layout)
    write_kv(k, v, kv, slots)
    ReferenceBackend().write_kv(k, v, expected_kv, slots)
    assert torch.equal(pool, expected)


def test_slots_outside_of_the_pool_are_not_written():
    layout = kv_layout(2, 2, 64, 16, torch.float32)
    kv, pool = pools(layout)
    k = torch.ones(3, 2, 64)
    write_kv(k, k, kv, torch.tensor([-1, 7 * 16, 2**30]).int())
    assert (pool == 0).all()
