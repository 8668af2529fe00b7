"""Filters in Triton: the bounds that a sort finds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton.least_kept import least_kept
from tests.kernels.cases import normal

INF, NAN = float("inf"), float("nan")


def kept(logits: list[float], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[int]:
    """The ids that the filters keep."""
    row = torch.tensor([logits])
    least = least_kept(
        row, torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    return (row[0] >= least[0]).nonzero().squeeze(1).tolist()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.65}, [1, 3]),
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.6}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),  # 0.4 and 0.3 of 0.9 reach 0.75
        ({"top_k": 3, "top_p": 0.8}, [1, 2, 3]),
        ({"top_p": 0.75, "min_p": 0.7}, [1, 3]),
        ({"temperature": 0.5, "top_p": 0.8}, [1, 3]),  # 0.16 and 0.09 of 0.3
        ({"temperature": 0.0, "top_k": 1}, [0, 1, 2, 3]),
    ],
)
def test_written_down(filters, expected):
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()
    assert kept(logits, **filters) == expected


def test_equals_at_the_edge_are_all_kept():
    assert kept([1.0, 2.0, 2.0, 0.0], top_k=1) == [1, 2]
    assert kept([1.0, 2.0, 2.0, 0.0], top_k=3) == [0, 1, 2]
    assert kept([1.0, 2.0, 2.0, 0.0], min_p=1.0) == [1, 2]
    assert kept([-1.0, 0.0, -0.0, -2.0], top_k=1) == [1, 2]
    assert kept([5.0] * 40, top_p=0.1) == list(range(40))


def cases(rows: int, vocab: int) -> tuple[torch.Tensor, ...]:
    """Rows with and without each filter, some banned ids, some equals."""
    generator = torch.Generator().manual_seed(vocab)
    logits = normal(rows, vocab, dtype=torch.float32, seed=vocab, scale=3)
    logits[::2] = logits[::2].round()
    if vocab > 5:
        logits[:, ::5] = -INF
    temperatures = torch.rand(rows, generator=generator) + 0.3
    top_k = torch.randint(1, max(2, vocab // 2), (rows,), generator=generator)
    top_p = torch.rand(rows, generator=generator)
    min_p = torch.rand(rows, generator=generator) * 0.02
    top_k[:2], top_p[2:4], min_p[::3] = 0, 1.0, 0.0
    return logits, temperatures, top_k, top_p, min_p


@pytest.mark.parametrize("vocab", [1, 7, 100, 3000, 10000])
def test_matches_reference(reference, vocab):
    arguments = cases(6, vocab)
    out, expected = least_kept(*arguments), reference.least_kept(*arguments)
    kept_ids, expected_ids = (arguments[0] >= bound.unsqueeze(1) for bound in (out, expected))
    assert torch.equal(kept_ids, expected_ids)
    wide = torch.nn.functional.pad(arguments[0], (3, 4))
    assert torch.equal(least_kept(wide[1:3, 3:-4], *(column[1:3] for column in arguments[1:])), out[1:3])


def test_any_numbers(reference):
    """Far outliers, neighbours in fp32, and a row of one value."""
    logits = normal(4, 200, dtype=torch.float32, seed=1)
    logits[0] *= 1e30
    logits[1] = torch.nextafter(torch.ones(200), torch.tensor(2.0)) * torch.where(torch.arange(200) % 2 == 0, 1.0, -1.0)
    logits[1, 50] = 1.0
    logits[2] = logits[2] * 1e-38
    logits[3] = -7.0
    ones = torch.ones(4)
    for k in (1, 3, 150, 200):
        arguments = (logits, ones, torch.full((4,), k), ones, 0 * ones)
        assert torch.equal(least_kept(*arguments), reference.least_kept(*arguments))
    for p in (0.01, 0.5, 0.999):
        arguments = (logits, ones, torch.zeros(4, dtype=torch.int64), torch.full((4,), p), 0 * ones)
        assert torch.equal(least_kept(*arguments), reference.least_kept(*arguments))


def test_rows_that_cannot_be_sampled_have_no_bound():
    logits = torch.zeros(3, 20)
    logits[0, 3], logits[1, 4], logits[2] = NAN, INF, -INF
    ones = torch.ones(3)
    out = least_kept(logits, ones, torch.full((3,), 2), 0.5 * ones, 0 * ones)
    assert out.tolist() == [-INF] * 3


def test_refuses():
    ones = torch.ones(2)
    with pytest.raises(InvalidArgumentError, match="top_k has shape"):
        least_kept(torch.zeros(2, 4), ones, ones, ones, ones)
    with pytest.raises(InvalidArgumentError, match="logits has shape"):
        least_kept(torch.zeros(2, 4).T, ones, ones.long(), ones, ones)
