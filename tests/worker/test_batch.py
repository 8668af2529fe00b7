from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.batch import build_batch
from octavo_worker.devices.cpu import CpuDevice
from octavo_worker.sequences import SequenceTable


def test_prefill_chunk_and_decodes_side_by_side() -> None:
    table = SequenceTable(1)
    first = table.put(1, np.arange(100, 120, dtype=np.int32), np.array([7, 3, 5], np.int32), 20, pb.SequenceParams())
    second = table.put(2, np.array([50, 51, 52], np.int32), np.array([9], np.int32), 2, pb.SequenceParams())
    batch = build_batch(
        table,
        np.array([second, first]),
        np.array([2, 6]),
        np.array([1, 5]),
        block_size=8,
        upload=CpuDevice().upload,
        with_prompt_lens=True,
    )
    assert batch.token_ids.tolist() == [52, 106, 107, 108, 109, 110]
    assert batch.prompt_lens is not None
    assert batch.prompt_lens.tolist() == [2, 20, 20, 20, 20, 20]
    attention = batch.attention
    assert attention.positions.tolist() == [2, 6, 7, 8, 9, 10]
    assert attention.slots.tolist() == [9 * 8 + 2, 7 * 8 + 6, 7 * 8 + 7, 3 * 8, 3 * 8 + 1, 3 * 8 + 2]
    assert attention.query_starts.tolist() == [0, 1, 6]
    assert attention.context_lens.tolist() == [3, 11]
    assert attention.block_tables.tolist() == [[9, 0], [7, 3]]
    for tensor in (batch.token_ids, attention.positions, attention.slots, attention.block_tables):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert attention.max_queries == 5


def test_a_token_of_each_sequence() -> None:
    table = SequenceTable(1)
    first = table.put(1, np.arange(100, 120, dtype=np.int32), np.array([7, 3, 5], np.int32), 15, pb.SequenceParams())
    second = table.put(2, np.array([50, 51, 52], np.int32), np.array([9], np.int32), 2, pb.SequenceParams())
    batch = build_batch(
        table,
        np.array([second, first]),
        np.array([2, 19]),
        np.array([1, 1]),
        block_size=8,
        upload=CpuDevice().upload,
        with_prompt_lens=True,
    )
    assert batch.token_ids.tolist() == [52, 119]
    assert batch.prompt_lens is not None
    assert batch.prompt_lens.tolist() == [2, 15]
    attention = batch.attention
    assert attention.positions.tolist() == [2, 19]
    assert attention.slots.tolist() == [9 * 8 + 2, 5 * 8 + 3]
    assert attention.query_starts.tolist() == [0, 1, 2]
    assert attention.context_lens.tolist() == [3, 20]
    assert attention.block_tables.tolist() == [[9, 0, 0], [7, 3, 5]]
    assert attention.max_queries == 1


def test_columns_go_to_a_device_at_once() -> None:
    table = SequenceTable(1)
    row = table.put(1, np.arange(100, 120, dtype=np.int32), np.array([7, 3, 5], np.int32), 20, pb.SequenceParams())
    uploads: list[int] = []

    def upload(columns: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        uploads.append(len(columns))
        assert {column.dtype for column in columns} == {np.dtype(np.int32)}
        return [torch.from_numpy(column) for column in columns]

    arguments = (table, np.array([row]), np.array([6]), np.array([5]))
    assert build_batch(*arguments, block_size=8, upload=upload).prompt_lens is None
    batch = build_batch(*arguments, block_size=8, upload=upload, with_prompt_lens=True)
    assert uploads == [6, 7]
    assert batch.prompt_lens is not None
    assert batch.prompt_lens.tolist() == [20] * 5
