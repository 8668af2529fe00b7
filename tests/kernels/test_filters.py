"""Top-k, top-p and min-p by sorting: written-down cases, equals at the edge, vocabularies of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo_kernels.filters import least_kept, without_least

INF = float("inf")


def kept(
    logits: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """The ids that the filters keep."""
    row = torch.tensor([logits])
    least = least_kept(
        row, torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    return (row[0] >= least[0]).nonzero().squeeze(1).tolist()


LOGITS = [float(np.log(share)) for share in (0.1, 0.4, 0.2, 0.3)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_p": 0.65}, [1, 3]),
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.6}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),  # 0.4 and 0.3 of 0.9 reach 0.75
        ({"top_k": 3, "top_p": 0.8}, [1, 2, 3]),
        ({"top_p": 0.75, "min_p": 0.7}, [1, 3]),
        ({"temperature": 0.5, "top_p": 0.8}, [1, 3]),  # 0.16 and 0.09 of 0.3
        ({"temperature": 0.5, "min_p": 0.3}, [1, 3]),
    ],
)
def test_filters(filters: dict[str, Any], expected: list[int]) -> None:
    assert kept(LOGITS, **filters) == expected


def test_equal_logits_at_the_edge_are_all_kept() -> None:
    assert kept([1.0, 2.0, 2.0, 0.0], top_k=1) == [1, 2]
    assert kept([1.0, 2.0, 2.0, 0.0], min_p=1.0) == [1, 2]


def test_large_vocabularies_are_cut_where_a_full_sort_cuts() -> None:
    logits = torch.randn(6, 9000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[8.0, 4, 2, 1, 0.1, 0]]).T
    for top_p in (0.3, 0.9, 0.999):
        for top_k in (0, 3, 300, 5000):
            least = least_kept(logits, torch.ones(6), torch.full((6,), top_k), torch.full((6,), top_p), torch.zeros(6))
            for row, bound in zip(logits, least, strict=True):
                values = row.sort(descending=True).values[: top_k or None]
                sums = values.double().softmax(0).cumsum(0)
                expected = int((sums < top_p).sum()) + 1
                real = int((row >= bound).sum())
                ties = int((row == values[min(expected, len(values)) - 1]).sum())
                assert abs(real - expected) <= ties  # a rounding of the sum may move the edge by one token


def test_rows_without_filters_have_no_bound() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    temperatures = torch.tensor([1.0, 0.0, 1.0, 1.0])
    top_k, top_p = torch.tensor([0, 3, 50, 3]), torch.ones(4)
    least = least_kept(logits, temperatures, top_k, top_p, torch.zeros(4))
    assert least[:3].tolist() == [-INF] * 3
    assert least[3] == logits[3].sort(descending=True).values[2]


def test_without_least_copies() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert without_least(logits, None) is logits
    assert without_least(logits, torch.tensor([2.0, -INF])).tolist() == [[-INF, 2.0, 3.0], [1.0, 2.0, 3.0]]
    assert logits[0, 0] == 1.0
