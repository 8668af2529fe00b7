from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend
from octavo_worker.bans import NO_BANS, BadWords, Bans, num_words, packed, unset

MASKED = float("-inf")


def ids_of(mask: np.ndarray) -> list[int]:
    return [32 * index + bit for index, word in enumerate(mask.tolist()) for bit in range(32) if word >> bit & 1]


@settings(deadline=None)
@given(st.sets(st.integers(0, 127)), st.lists(st.integers(0, 127)))
def test_packed_masks_behave_like_sets(ids: set[int], taken: list[int]) -> None:
    mask = packed(ids, 4)
    assert mask.dtype == np.uint32
    assert ids_of(mask) == sorted(ids)
    assert ids_of(~mask) == sorted({*range(128)} - ids)
    unset(mask, np.array(taken, np.int64))
    assert ids_of(mask) == sorted(ids - {*taken})


def test_words_cover_all_ids() -> None:
    assert [num_words(count) for count in (1, 32, 33, 49152)] == [1, 1, 2, 1536]


def completing(words: list[list[int]], output: list[int]) -> list[int]:
    return sorted(BadWords(words).completing(np.array(output, np.int32)).tolist())


def test_bad_words_as_transformers_bans_them() -> None:
    """Values of its NoBadWordsLogitsProcessor, but for words of one token, which are banned at all times."""
    words = [[4, 0, 7], [0, 4], [1, 0, 5], [4, 0, 1], [0, 0, 6]]
    assert completing(words, [0, 4, 0]) == [1, 4, 7]
    assert completing(words, [0]) == [4]
    assert completing(words, []) == []
    assert completing(words, [9, 9, 9, 1, 0]) == [4, 5]
    assert completing([[5, 5, 5]], [5, 5]) == [5]
    assert completing([[5, 5, 5]], [4, 5]) == []


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_only_tokens_that_complete_a_word_are_banned(words: list[list[int]], output: list[int]) -> None:
    expected = {token for token in range(3) for word in words if [*output, token][-len(word) :] == word}
    assert {*completing(words, output)} == expected


def test_apply_and_take(backend: Backend) -> None:
    masks = np.array([packed([1, 2], 2), packed([0, 39], 2), packed([5], 2)])
    bans = Bans(np.array([0, 2, 3]), masks, {2: (pb.SEQUENCE_ERROR_CODE_INVALID, "why")})
    logits = torch.zeros(5, 40)
    bans.apply(logits, backend)
    assert [(row == 0).nonzero().flatten().tolist() for row in logits[[0, 2, 3]]] == [[1, 2], [0, 39], [5]]
    assert bool((logits[[1, 4]] == 0).all())
    kept = bans.take(np.array([False, True, False, True, True]))
    assert kept.rows.tolist() == [1]
    assert ids_of(kept.masks[0]) == [5]
    assert not kept.problems
    assert bans.take(np.ones(5, np.bool_)).rows.tolist() == [0, 2, 3]


@pytest.mark.parametrize("kept", [[], [True, False]])
def test_no_bans(kept: list[bool], backend: Backend) -> None:
    logits = torch.ones(len(kept), 40)
    bans = NO_BANS.take(np.array(kept, np.bool_))
    bans.apply(logits, backend)
    assert not len(bans.rows)
    assert bool((logits == 1).all())
