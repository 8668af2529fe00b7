from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker import launched_scores
from octavo_worker.launched_scores import launch_scores
from octavo_worker.sampler import log_probabilities
from tests.worker.late_device import LateDevice

ALL = np.ones(8, np.bool_)


def filled(
    logits: torch.Tensor, tokens: list[int], at: list[int], num_tops: list[int], kept: np.ndarray = ALL
) -> pb.LogprobColumns:
    """The columns of rows `at`."""
    scores = launch_scores(
        logits, torch.tensor(tokens), torch.tensor(at), np.array(at), np.array(num_tops), LateDevice()
    )
    columns = pb.LogprobColumns()
    scores.fill(columns, kept)
    return columns


def expected(logits: torch.Tensor, tokens: list[int], num_tops: list[int]) -> pb.LogprobColumns:
    rows = log_probabilities(logits, torch.tensor(tokens), np.array(num_tops))
    columns = pb.LogprobColumns(logprobs=rows.logprobs.tolist(), top_counts=rows.tops.counts.tolist())
    for count, ids, logprobs in zip(rows.tops.counts, rows.tops.ids, rows.tops.logprobs, strict=True):
        columns.top_token_ids.extend(ids[:count].tolist())
        columns.top_logprobs.extend(logprobs[:count].tolist())
    return columns


@pytest.mark.parametrize("num_equals", [1, 3, 9, 30])
@pytest.mark.parametrize("num_tops", [[0, 2], [1, 5], [20, 7], [40, 3]])
def test_equals_the_ones_that_are_waited_for(num_tops: list[int], num_equals: int) -> None:
    """Where equals stand around the end of what is wanted, too."""
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(num_equals))
    logits[:, torch.randperm(40, generator=torch.Generator().manual_seed(1))[:num_equals]] = 1.5
    assert filled(logits, [3, 4], [0, 1], num_tops) == expected(logits, [3, 4], num_tops)


def test_banned_tokens_are_not_among_the_likeliest() -> None:
    logits = torch.full((1, 40), float("-inf"))
    logits[0, [7, 9]] = torch.tensor([1.0, 2.0])
    columns = filled(logits, [9], [0], [5])
    assert (list(columns.top_counts), list(columns.top_token_ids)) == ([2], [9, 7])


def test_rows_that_did_not_ask_or_failed_are_left_out() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(3))
    logits[2] = float("nan")
    kept = np.array([True, True, False, True])
    columns = filled(logits, [1, 2, -1, 4], [0, 2, 3], [2, 2, 1], kept)
    assert columns == expected(logits[[0, 3]], [1, 4], [2, 1])


def test_the_device_is_asked_again_only_where_equals_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = launched_scores.log_probabilities

    def noted(logits: torch.Tensor, *arguments: object) -> object:
        asked.append(len(logits))
        return real(logits, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(launched_scores, "log_probabilities", noted)
    logits = torch.arange(80.0).view(2, 40)
    filled(logits, [1, 2], [0, 1], [3, 3])
    assert asked == []
    logits[1] = 2.0
    filled(logits, [1, 2], [0, 1], [3, 3])
    assert asked == [1]
