from __future__ import annotations

import numpy as np
import torch

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels.decode_state import FROM_STATE, PADDING
from octavo_worker.device_table import DeviceTable
from octavo_worker.sequences import SequenceTable

CPU = torch.device("cpu")


def table_of(*block_tables: list[int]) -> SequenceTable:
    """Sequences 1, 2, … with these blocks."""
    table = SequenceTable(2)
    for number, blocks in enumerate(block_tables):
        table.put(number + 1, np.zeros(20, np.int32), np.array(blocks, np.int32), 20, pb.SequenceParams())
    return table


def columns(known: DeviceTable, table: SequenceTable, ids: list[int], num_lanes: int) -> list[list[int]]:
    """A step over the sequences' last tokens, position 19."""
    rows = table.find(ids)
    tokens = np.full(len(ids), FROM_STATE, np.int32)
    made = known.columns(table, rows, np.full(len(ids), 19), tokens, num_lanes)
    assert {column.dtype for column in made} == {np.dtype(np.int32)}
    return [column.tolist() for column in made]


def test_a_block_travels_once() -> None:
    table, known = table_of([5, 6, 7], [8]), DeviceTable(4, CPU)
    known.grow(2)
    first, second = table.find([1, 2]).tolist()
    assert columns(known, table, [1, 2], 2) == [
        [first, second], [19, 19], [FROM_STATE] * 2, [0, 0], [0, 3, 4], [5, 6, 7, 8],
    ]  # fmt: skip
    assert columns(known, table, [2, 1], 2)[3:] == [[1, 3], [0, 0, 0], [0]]
    table.blocks.append(table.find([2]), np.array([2]), np.array([9, 10], np.int32))
    assert columns(known, table, [1, 2], 2)[3:] == [[3, 1], [0, 0, 2], [9, 10]]


def test_lanes_are_padded() -> None:
    table, known = table_of([5, 6]), DeviceTable(4, CPU)
    known.grow(2)
    (row,) = table.find([1]).tolist()
    assert columns(known, table, [1], 4) == [
        [row, PADDING, PADDING, PADDING], [19, 0, 0, 0], [FROM_STATE, 0, 0, 0], [0, 0, 0, 0], [0, 2, 2, 2, 2], [5, 6],
    ]  # fmt: skip


def test_a_row_with_another_sequence_is_told_anew() -> None:
    table, known = table_of([5, 6]), DeviceTable(4, CPU)
    known.grow(2)
    columns(known, table, [1], 1)
    table.put(1, np.zeros(20, np.int32), np.array([5, 9], np.int32), 20, pb.SequenceParams())
    assert columns(known, table, [1], 1)[3:] == [[0], [0, 2], [5, 9]]


def test_growing_keeps_what_is_known_and_forgetting_does_not() -> None:
    table, known = table_of([5, 6]), DeviceTable(4, CPU)
    known.grow(2)
    columns(known, table, [1], 1)
    known.state.last_tokens.fill_(7)
    known.grow(5)
    assert known.state.last_tokens.tolist() == [7, 7, 0, 0, 0]
    assert known.state.block_tables.shape == (5, 4)
    assert columns(known, table, [1], 1)[4:] == [[0, 0], [0]]
    known.forget()
    known.grow(2)
    assert columns(known, table, [1], 1)[4:] == [[0, 2], [5, 6]]


def test_blocks_beyond_the_longest_text_stay_away() -> None:
    table, known = table_of([5, 6, 7, 8, 9, 10]), DeviceTable(4, CPU)
    known.grow(2)
    assert columns(known, table, [1], 1)[3:] == [[0], [0, 4], [5, 6, 7, 8]]
    assert columns(known, table, [1], 1)[3:] == [[4], [0, 0], [0]]
