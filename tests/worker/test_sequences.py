from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.processors import LogitProcessors
from octavo_worker.sampler import sample_columns
from octavo_worker.sequences import (
    MIN_TEMPERATURE,
    NEEDS_LOGITS,
    NEEDS_NOISE,
    NEEDS_PROMPT_SCORES,
    RaggedRows,
    SequenceTable,
)

PARAMS = pb.SequenceParams(temperature=0.5, top_p=0.9, seed=(1 << 64) - 1, suppressed_token_ids=[3, 4])
PROCESSORS = LogitProcessors(96, None)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 99), max_size=40), st.booleans()), max_size=40))
def test_rows_behave_like_lists(changes: list[tuple[int, list[int], bool]]) -> None:
    rows, model = RaggedRows(5, num_items=8), [[] for _ in range(5)]
    for row, values, replaces in changes:
        if replaces:
            rows.set(row, np.array(values, np.int32))
            model[row] = list(values)
        elif not values:
            rows.clear(row)
            model[row] = []
        else:
            if len(values) == 1:
                rows.append_one(ints(row), np.array(values, np.int32))
            else:
                rows.append(ints(row), ints(len(values)), np.array(values, np.int32))
            model[row] = model[row] + values
        assert [rows.get(index).tolist() for index in range(5)] == model
        assert rows.lengths.tolist() == [len(items) for items in model]


def test_many_rows_at_once() -> None:
    rows = RaggedRows(3)
    rows.append(ints(2, 0, 1), ints(2, 0, 3), np.array([1, 2, 3, 4, 5], np.int32))
    rows.append(ints(0, 2), ints(1, 1), np.array([9, 8], np.int32))
    assert rows.padded(ints(1, 0, 2), 4).tolist() == [[3, 4, 5, 0], [9, 0, 0, 0], [1, 2, 8, 0]]
    assert rows.padded(ints(1), 2).tolist() == [[3, 4]]
    assert rows.padded(ints(2, 1), 3).tolist() == [[1, 2, 8], [3, 4, 5]]
    assert rows.gather(ints(2, 1), ints(1, 0), ints(2, 2)).tolist() == [2, 8, 3, 4]
    assert rows.pick(ints(2, 1), ints(2, 0)).tolist() == [8, 3]


def test_table_keeps_and_replaces_sequences() -> None:
    table = SequenceTable(1)
    processors = PROCESSORS.prepare(PARAMS)
    row = table.put(7, np.array([1, 2], np.int32), np.array([5], np.int32), 2, PARAMS, processors)
    assert table.find([7, 8]).tolist() == [row, -1]
    assert table.params[row]["seed"] == -1
    assert table.params[row][["has_suppressed", "has_bans", "has_grammar", "has_adjustments"]].tolist() == (
        True,
        False,
        False,
        False,
    )
    assert table.processors[row] is processors
    child = table.fork(table.params[row].copy(), processors, 9, np.array([1], np.int32), np.array([], np.int32))
    assert table.processors[child].options is processors.options
    assert table.processors[child] is not processors
    table.remove(9)
    assert child not in table.processors
    assert table.put(7, np.array([9], np.int32), np.array([], np.int32), 1, pb.SequenceParams()) == row
    assert table.tokens.get(row).tolist() == [9]
    assert row not in table.processors


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        ({}, 0),
        ({"temperature": 9e-6, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4}, 0),
        ({"temperature": MIN_TEMPERATURE}, NEEDS_NOISE),  # compared in fp32, as the sampler does
        ({"temperature": 0.7}, NEEDS_NOISE),
        ({"candidate_count": 2}, NEEDS_LOGITS),
        ({"return_logprobs": True}, NEEDS_LOGITS),
        ({"return_prompt_logprobs": True}, NEEDS_PROMPT_SCORES),
        ({"suppressed_token_ids": [3], "min_token_count": 1}, NEEDS_LOGITS),
        ({"allowed_token_ids": [3]}, NEEDS_LOGITS),
        ({"grammar": "start: /a/"}, NEEDS_LOGITS),
        ({"frequency_penalty": 0.5, "temperature": 1.0, "return_prompt_logprobs": True}, 7),
    ],
    ids=str,
)
def test_what_sampling_a_sequence_needs(params: dict[str, Any], needs: int) -> None:
    table = SequenceTable(4)
    tokens, blocks, message = np.array([1], np.int32), np.array([0], np.int32), pb.SequenceParams(**params)
    plain = table.put(1, tokens, blocks, 1, pb.SequenceParams())
    row = table.put(2, tokens, blocks, 1, message, PROCESSORS.prepare(message))
    child = table.fork(table.params[row].copy(), table.processors.get(row), 3, tokens, blocks)
    assert [table.needs(ints(*rows)) for rows in ((row,), (child,), (plain, child), (plain,), ())] == [
        needs,
        needs,
        needs,
        0,
        0,
    ]
    is_cool = sample_columns(table.params[ints(row)], ints(1))[0] == 0
    assert is_cool == (needs & NEEDS_NOISE == 0)


def test_table_grows_and_reuses_rows() -> None:
    table = SequenceTable(2)
    for sequence_id in range(9):
        table.put(
            sequence_id,
            np.full(3, sequence_id, np.int32),
            np.array([], np.int32),
            3,
            PARAMS,
            PROCESSORS.prepare(PARAMS),
        )
    for sequence_id in range(0, 9, 2):
        table.remove(sequence_id)
    table.remove(100)
    for sequence_id in (1, 3, 5, 7):
        assert table.tokens.get(int(table.find([sequence_id])[0])).tolist() == [sequence_id] * 3
    row = table.put(20, np.array([1], np.int32), np.array([], np.int32), 1, pb.SequenceParams())
    assert len(table.params) == 16
    assert row not in table.processors


def test_memory_stays_bounded_while_sequences_come_and_go() -> None:
    table = SequenceTable(4)
    for sequence_id in range(500):
        table.put(sequence_id, np.zeros(700, np.int32), np.zeros(44, np.int32), 700, PARAMS)
        table.tokens.append(table.find([sequence_id]), ints(400), np.zeros(400, np.int32))
        table.remove(sequence_id)
    assert len(table.tokens._data) <= 1 << 14
    assert len(table.params) == 4


def test_items_are_replaced_where_they_stand() -> None:
    table = SequenceTable(2)
    first = table.put(1, np.arange(5, dtype=np.int32), np.array([], np.int32), 5, PARAMS)
    second = table.put(2, np.arange(20, 30, dtype=np.int32), np.array([], np.int32), 5, PARAMS)
    table.tokens.replace(np.array([second, first]), np.array([9, 0]), np.array([77, 88], np.int32))
    assert table.tokens.get(first).tolist() == [88, 1, 2, 3, 4]
    assert table.tokens.get(second).tolist() == [*range(20, 29), 77]


def test_a_rows_version_tells_its_sequences_apart() -> None:
    table = SequenceTable(1)
    tokens, blocks = np.zeros(3, np.int32), np.array([], np.int32)
    row = table.put(1, tokens, blocks, 3, PARAMS)
    seen = [int(table.versions[row])]
    table.put(1, tokens, blocks, 3, PARAMS)  # anew
    seen.append(int(table.versions[row]))
    table.remove(1)
    seen.append(int(table.versions[row]))
    assert table.put(2, tokens, blocks, 3, PARAMS) == row
    seen.append(int(table.versions[row]))
    table.put(3, tokens, blocks, 3, PARAMS)  # the table grows
    seen.append(int(table.versions[row]))
    assert seen == [1, 2, 3, 4, 4]
