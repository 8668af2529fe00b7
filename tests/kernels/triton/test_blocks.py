"""Copies and moves of whole blocks."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton.blocks import _brought, copy_blocks, move_blocks
from octavo_kernels.triton.paged_kv import kv_layout


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"), [(64, 16, torch.float32), (80, 8, torch.float16), (33, 8, torch.int8)]
)
def test_moves_blocks(head_dim, block_size, dtype):
    layout = kv_layout(2, 3, head_dim, block_size, dtype)
    source = torch.randint(-100, 100, layout.pool_shape(9)).to(layout.pool_dtype)
    target = torch.zeros(layout.pool_shape(5), dtype=layout.pool_dtype)
    expected = target.clone()
    expected[[4, 0, 2]] = source[[1, 8, 8]]
    move_blocks(source, torch.tensor([1, 8, 8]), target, torch.tensor([4, 0, 2]))
    assert torch.equal(target, expected)


def test_copies_blocks_within_a_pool():
    pool = torch.randn(kv_layout(1, 1, 64, 16, torch.float32).pool_shape(6))
    expected = pool.clone()
    expected[[5, 0]] = pool[[2, 3]]
    copy_blocks(pool, torch.tensor([2, 3]), torch.tensor([5, 0]))
    assert torch.equal(pool, expected)


def test_ids_reach_another_device_out_of_pinned_memory(monkeypatch):
    ids, pinned, asked = torch.tensor([3, 1]), torch.tensor([3, 1]), []

    def to(tensor, device, **options):
        asked.append((tensor is pinned, device, options))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert _brought(ids, torch.device("cpu")) is ids
    assert _brought(ids, torch.device("cuda", 0)) is pinned
    assert asked == [(True, torch.device("cuda", 0), {"non_blocking": True})]


def test_moves_nothing():
    pool = torch.ones(3, 2, 2, 2, 128)
    copy_blocks(pool, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert (pool == 1).all()


def test_refuses_pools_that_do_not_match():
    pool, ids = torch.ones(3, 2, 2, 2, 128), torch.tensor([0])
    for arguments, message in (
        ((pool, ids, pool[..., :64].contiguous(), ids), "target has shape"),
        ((pool, ids, pool.half(), ids), "blocks of"),
        ((pool[..., :64], ids, pool[..., :64], ids), "a contiguous pool is needed"),
        ((pool, ids, pool, ids.int()), "target_blocks has shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            move_blocks(*arguments)
