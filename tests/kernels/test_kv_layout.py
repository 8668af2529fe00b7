"""Layouts of the pool: the same values in every one, and who takes which."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import InvalidArgumentError, KVLayout


@pytest.mark.parametrize("k_transposed", [False, True])
@pytest.mark.parametrize("v_transposed", [False, True])
def test_views_have_one_shape(reference, k_transposed, v_transposed):
    layout = KVLayout(2, 3, 8, 16, torch.float32, k_transposed, v_transposed)
    pool = torch.zeros(layout.pool_shape(4))
    kv = layout.layer(pool, 1)
    assert kv.k.shape == (4, 3, 8, 16)
    assert kv.v.shape == (4, 3, 16, 8)
    k, v = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    reference.write_kv(k, v, kv, torch.tensor([2 * 16 + 5]).int())
    tiles = pool[2, 1]  # (2, heads, tile)
    k_tile = tiles[0, 1].view((8, 16) if k_transposed else (16, 8))
    v_tile = tiles[1, 1].view((8, 16) if v_transposed else (16, 8))
    assert torch.equal(k_tile[:, 5] if k_transposed else k_tile[5], k[0, 1])
    assert torch.equal(v_tile[:, 5] if v_transposed else v_tile[5], v[0, 1])
    assert torch.count_nonzero(pool) == 2 * 3 * 8


def test_8_bit_floats_and_their_scales(reference):
    layout = KVLayout(1, 1, 4, 8, torch.float8_e4m3fn)
    assert layout.bytes_per_block == 2 * 8 * (4 + 4)
    kv = layout.layer(torch.zeros(layout.pool_shape(1), dtype=layout.pool_dtype), 0)
    k = torch.tensor([[[1.0, -2.0, 0.5, 4.0]]])
    reference.write_kv(k, torch.full((1, 1, 4), float("inf")), kv, torch.tensor([3]).int())
    assert kv.k_scales[0, 0, 3] == torch.tensor(4.0) / 448
    assert kv.k[0, 0, :, 3].float().tolist() == [112.0, -224.0, 56.0, 448.0]
    assert kv.v_scales[0, 0, 3].isnan()
    assert kv.v[0, 0, 3].float().tolist() == [0.0] * 4


def test_what_a_backend_prefers(native, reference):
    wanted = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "block_size": 16}
    for backend in (native(), reference):
        assert backend.kv_layout(**wanted, dtype=torch.float16) == KVLayout(2, 3, 8, 16, torch.float16)
    with pytest.raises(InvalidArgumentError, match="no K and V in 8-bit floats"):
        native().kv_layout(**wanted, dtype=torch.float8_e4m3fn)
    other = KVLayout(2, 3, 8, 16, torch.float32, k_transposed=False)
    kv, slots = other.layer(torch.zeros(other.pool_shape(2)), 0), torch.tensor([0]).int()
    with pytest.raises(InvalidArgumentError, match="tiles of K and V must be"):
        native().write_kv(torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), kv, slots)
