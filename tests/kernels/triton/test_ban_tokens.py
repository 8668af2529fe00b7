"""Bans in Triton against the oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton.ban_tokens import ban_tokens
from tests.kernels.cases import normal


@pytest.mark.parametrize("vocab", [1, 31, 33, 4096, 5000])
def test_matches_reference(reference, vocab):
    wide = normal(6, vocab + 9, dtype=torch.float32, seed=1)
    expected = wide.clone()
    generator = torch.Generator().manual_seed(2)
    masks = torch.randint(-(2**31), 2**31, (3, vocab // 32 + 2), dtype=torch.int64, generator=generator).int()
    rows = torch.tensor([4, 0, 5])
    ban_tokens(wide[:, 2 : 2 + vocab], rows, masks)
    reference.ban_tokens(expected[:, 2 : 2 + vocab], rows, masks)
    assert torch.equal(wide, expected)


def test_rows_that_do_not_exist_are_passed_over():
    logits = torch.zeros(2, 40)
    ban_tokens(logits, torch.tensor([2, -1]), torch.zeros(2, 2, dtype=torch.int32))
    assert not logits.count_nonzero()
    ban_tokens(logits, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int32))


def test_refuses():
    logits, rows = torch.zeros(2, 40), torch.tensor([0])
    for wrong in (torch.zeros(1, 1), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)):
        with pytest.raises(InvalidArgumentError, match="masks has shape"):
            ban_tokens(logits, rows, wrong.int() if wrong.dtype is torch.float32 else wrong)
    with pytest.raises(InvalidArgumentError, match="rows has shape"):
        ban_tokens(logits, rows.int(), torch.zeros(1, 2, dtype=torch.int32))
