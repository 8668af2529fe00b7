"""Banning tokens by packed masks: both backends against single bits, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from tests.kernels.cases import normal

INF = float("inf")


@pytest.fixture(params=["native", "reference"])
def backend(request, native, reference):
    return native() if request.param == "native" else reference


def masks_of(*rows: list[int], words: int) -> torch.Tensor:
    """Masks in which just these ids are set."""
    masks = torch.zeros((len(rows), words), dtype=torch.int64)
    for row, ids in zip(masks, rows, strict=True):
        for token_id in ids:
            row[token_id // 32] |= 1 << token_id % 32
    return torch.where(masks >= 1 << 31, masks - (1 << 32), masks).to(torch.int32)


def test_bits_stand_for_ids_lowest_first(backend):
    logits = torch.arange(3 * 70, dtype=torch.float32).reshape(3, 70)
    before = logits.clone()
    backend.ban_tokens(logits, torch.tensor([2, 0]), masks_of([0, 31, 32, 69], [5, 95], words=3))
    assert logits[1].tolist() == before[1].tolist()
    assert {i: v for i, v in enumerate(logits[2].tolist()) if v != -INF} == {0: 140, 31: 171, 32: 172, 69: 209}
    assert {i: v for i, v in enumerate(logits[0].tolist()) if v != -INF} == {5: 5}


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 49152])
@pytest.mark.parametrize("extra", [0, 2])
def test_random_masks(backend, vocab, extra):
    generator = torch.Generator().manual_seed(vocab)
    words = -(-vocab // 32) + extra
    masks = torch.randint(-(1 << 31), 1 << 31, (5, words), generator=generator).to(torch.int32)
    masks[1], masks[2] = -1, 0
    masks[3, ::2] = -1
    logits = normal(7, vocab, dtype=torch.float32, seed=1)
    expected = logits.clone()
    rows = torch.tensor([6, 0, 3, 2, 5])
    for row, mask in zip(rows.tolist(), masks.tolist(), strict=True):
        for token_id in range(0, vocab, 1 if vocab <= 1000 else 997):
            if not mask[token_id // 32] >> token_id % 32 & 1:
                expected[row, token_id] = -INF
    backend.ban_tokens(logits, rows, masks)
    looked_at = slice(0, vocab, 1 if vocab <= 1000 else 997)
    assert torch.equal(logits[:, looked_at], expected[:, looked_at])
    kept = logits > -INF
    assert torch.equal(logits[kept], normal(7, vocab, dtype=torch.float32, seed=1)[kept])


def test_rows_of_a_wider_tensor(backend):
    wide = torch.zeros(4, 100)
    backend.ban_tokens(wide[:, 10:50], torch.tensor([3]), masks_of([1], words=2))
    assert (wide == -INF).nonzero().tolist() == [[3, column] for column in range(10, 50) if column != 11]


def test_no_rows(backend):
    logits = torch.ones(2, 40)
    backend.ban_tokens(logits, torch.zeros(0, dtype=torch.int64), torch.zeros((0, 2), dtype=torch.int32))
    assert torch.equal(logits, torch.ones(2, 40))


@pytest.mark.parametrize(
    ("rows", "masks", "message"),
    [
        ([2], torch.zeros((1, 2), dtype=torch.int32), "row 2"),
        ([-1], torch.zeros((1, 2), dtype=torch.int32), "row -1"),
        ([0], torch.zeros((1, 1), dtype=torch.int32), r"\(1, 1\)"),
        ([0], torch.zeros((1, 2), dtype=torch.int64), "int64"),
        ([0], torch.zeros((2, 2), dtype=torch.int32), r"\(2, 2\)"),
    ],
)
def test_refuses_what_does_not_fit(backend, rows, masks, message):
    with pytest.raises(InvalidArgumentError, match=message):
        backend.ban_tokens(torch.zeros(2, 40), torch.tensor(rows), masks)
