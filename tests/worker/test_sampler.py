from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels import Backend, load_backend
from octavo_worker.bans import NO_BANS, Bans, num_words, packed
from octavo_worker.sampler import candidates, finite_rows, log_probabilities, sample
from octavo_worker.sequences import PARAMS_DTYPE


def params_of(*rows: dict[str, Any]) -> np.ndarray:
    params = np.zeros(len(rows), PARAMS_DTYPE)
    params["top_p"] = 1
    for index, row in enumerate(rows):
        for key, value in row.items():
            params[key][index] = value
    return params


LOGITS = [float(np.log(share)) for share in (0.1, 0.4, 0.2, 0.3)]
EXTREMES = [
    {"temperature": 1e-12},
    {"temperature": 1e-40},
    {"temperature": 1e4},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**9},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2e-5, "top_p": 0.5, "top_k": 7, "min_p": 0.5},
    {"temperature": 0.0, "top_p": 0.1, "top_k": 2, "min_p": 0.9},
]


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("scale", [1.0, 1e4, 0.0])
def test_extreme_values_give_a_valid_id(extreme: dict[str, Any], scale: float, backend: Backend) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)) * scale
    ids = sample(logits, params_of(*[{**extreme, "seed": seed} for seed in range(3)]), np.arange(3), backend)
    assert ids.shape == (3,)
    assert bool(((ids >= 0) & (ids < 500)).all())


def test_tiny_temperature_is_greedy(backend: Backend) -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3))
    params = params_of(*[{"temperature": t, "seed": 5} for t in (0.0, 1e-12, 1e-40, 9e-6)])
    assert sample(logits, params, np.arange(4), backend).tolist() == logits.argmax(1).tolist()


def test_row_does_not_depend_on_its_neighbours(backend: Backend) -> None:
    rows = [
        {"temperature": 0.8, "top_p": 0.9, "seed": 1},
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 400, "seed": 3},
        {"temperature": 1.0, "min_p": 0.05, "seed": -4},
        {"temperature": 3.0, "top_p": 0.99, "seed": 5},
    ]
    logits = torch.randn(5, 9000, generator=torch.Generator().manual_seed(4)) * 3
    positions = np.array([4, 100, 7, 8, 9])
    logits[2, 5:7] = float("-inf")
    together = sample(logits, params_of(*rows), positions, backend).tolist()
    tops = np.array([3, 0, 5, 1, 2])
    rows_together = log_probabilities(logits, torch.tensor(together), tops)
    for index, row in enumerate(rows):
        one = logits[index : index + 1].clone()
        token = sample(one, params_of(row), positions[index : index + 1], backend)
        assert token.tolist() == together[index : index + 1]
        alone = log_probabilities(one, token, tops[index : index + 1])
        assert torch.equal(alone.logprobs, rows_together.logprobs[index : index + 1])
        assert torch.equal(alone.tops.ids[0], rows_together.tops.ids[index, : tops[index]])
        assert torch.equal(alone.tops.logprobs[0], rows_together.tops.logprobs[index, : tops[index]])


def test_seed_and_position_choose_the_token(backend: Backend) -> None:
    logits = torch.zeros(1, 1000)
    params = params_of({"temperature": 1.0, "seed": 11})
    drawn = {position: sample(logits, params, np.array([position]), backend).item() for position in range(20)}
    assert len(set(drawn.values())) > 15
    assert sample(logits, params, np.array([3]), backend).item() == drawn[3]
    assert sample(logits, params_of({"temperature": 1.0, "seed": 12}), np.array([3]), backend).item() != drawn[3]


def test_frequencies_follow_the_probabilities(backend: Backend) -> None:
    logits = torch.tensor([LOGITS]).repeat(4000, 1)
    params = params_of(*[{"temperature": 1.0, "seed": 1}] * 4000)
    counts = torch.bincount(sample(logits, params, np.arange(4000), backend), minlength=4) / 4000
    assert counts.tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.999}])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0, 100.0])
def test_banned_tokens_are_never_given_and_logits_stay(
    temperature: float, filters: dict[str, Any], backend: Backend
) -> None:
    masked = float("-inf")
    logits = torch.tensor([[masked, masked, 4.0], [1.0, masked, masked], [masked, -1e30, masked]])
    before = logits.clone()
    params = params_of(*[{"temperature": temperature, **filters}] * 3)
    assert sample(logits, params, np.array([0, 0, 0]), backend).tolist() == [2, 0, 1]
    assert torch.equal(logits, before)


def test_log_probabilities() -> None:
    rows = log_probabilities(torch.tensor([LOGITS, LOGITS]), torch.tensor([0, 3]), np.array([2, 0]))
    assert rows.logprobs.exp().tolist() == pytest.approx([0.1, 0.3])
    assert rows.tops.ids.tolist()[0] == [1, 3]
    assert rows.tops.logprobs[0].exp().tolist() == pytest.approx([0.4, 0.3])
    assert rows.tops.counts.tolist() == [2, 0]


def banned(logits: torch.Tensor, token_ids: dict[int, np.ndarray]) -> Bans:
    words = num_words(logits.shape[1])
    masks = [~packed(ids, words) for ids in token_ids.values()]
    return Bans(np.array([*token_ids], np.int64), np.array(masks, np.uint32).reshape(len(masks), words))


def ranked(logits: torch.Tensor, counts: list[int], suppressed: dict[int, np.ndarray] | None = None) -> list[list[int]]:
    found = candidates(logits, np.array(counts), banned(logits, suppressed or {}), load_backend("reference"))
    return [ids[:count] for ids, count in zip(found.ids.tolist(), found.counts.tolist(), strict=True)]


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
def test_candidates_are_those_of_log_softmax_and_topk_whatever_rows_stand_beside_them(
    num_rows: int, backend: Backend
) -> None:
    logits = torch.randn(num_rows, 49152, generator=torch.Generator().manual_seed(6)) * 5
    counts = np.array([2 + row % 9 for row in range(num_rows)])
    found = candidates(logits, counts, NO_BANS, backend)
    assert found.counts.tolist() == counts.tolist()
    for row, count in enumerate(counts):
        expected = torch.log_softmax(logits[row], dim=0)
        top = expected.topk(int(count))
        assert torch.equal(found.ids[row, :count], top.indices)
        assert torch.equal(found.logprobs[row, :count], top.values)
        assert torch.allclose(expected.double(), torch.log_softmax(logits[row].double(), dim=0), atol=1e-5)


def test_equal_candidates_come_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0] * 6, [5.0, 4.0, 5.0, 4.0, 3.0, 3.0]])
    assert ranked(logits, [4, 3, 1]) == [[1, 3, 2, 4], [0, 1, 2], [0]]
    wide = torch.zeros(1, 5000)
    wide[0, [4000, 17]] = 1.0
    assert ranked(wide, [5]) == [[17, 4000, 0, 1, 2]]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-2, 3), min_size=7, max_size=7), min_size=1, max_size=4), st.data())
def test_candidates_are_the_first_of_a_stable_sort(rows: list[list[int]], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    suppressed = {0: np.array(data.draw(st.lists(st.integers(0, 6), max_size=6, unique=True)), np.int64)}
    expected = []
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        left = [item for item in range(7) if index or item not in suppressed[0]]
        expected.append(sorted(left, key=lambda item, row=row: (-row[item], item))[:count])
    assert ranked(torch.tensor(rows, dtype=torch.float32), counts, suppressed) == expected


def test_banned_ids_are_no_candidates_and_keep_their_share(backend: Backend) -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    before = logits.clone()
    found = candidates(logits, np.array([2, 2]), banned(logits, {1: np.array([1, 2])}), backend)
    assert found.ids.tolist() == [[1, 3], [3, 0]]
    assert found.logprobs.exp().flatten().tolist() == pytest.approx([0.4, 0.3, 0.3, 0.1])
    assert torch.equal(logits, before)


def test_fewer_candidates_where_fewer_tokens_are_left() -> None:
    assert ranked(torch.tensor([LOGITS, LOGITS]), [9, 3], {1: np.array([0, 2])}) == [[1, 3, 2, 0], [1, 3]]
    assert ranked(torch.tensor([LOGITS]), [0]) == [[]]


def test_finite_rows() -> None:
    logits = torch.zeros(4, 10)
    logits[1, 3], logits[2, 9], logits[3, 0] = float("nan"), float("inf"), float("-inf")
    assert finite_rows(logits).tolist() == [True, False, False, False]
