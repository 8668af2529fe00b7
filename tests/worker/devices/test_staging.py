from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo_worker.devices.staging import StagingRing

CPU = torch.device("cpu")


class Event:
    """A mark that writes down what is asked of it."""

    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def record(self) -> None:
        self._log.append(f"record {self._number}")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._log.append(f"wait {self._number}")


class Ring:
    """A ring of two buffers, what was made for it, and what it asked of its events."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sizes: list[int] = []
        self._num_events = 0
        self.ring = StagingRing(self._buffer, self._event, num_slots=2)

    def _buffer(self, num_bytes: int) -> Tensor:
        self.sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def _event(self) -> Event:
        self._num_events += 1
        return Event(self.log, self._num_events)


@pytest.fixture
def staged() -> Ring:
    return Ring()


def test_columns_come_back_with_their_shapes_and_dtypes(staged: Ring) -> None:
    columns = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, np.int64),
        np.array([[1.5, -2.0], [3.0, 4.0]], np.float32).T,
        np.array([-(1 << 62)], np.int64),
        np.array([True, False]),
    ]
    tensors = staged.ring.upload(columns, CPU)
    for column, tensor in zip(columns, tensors, strict=True):
        assert tensor.shape == column.shape
        np.testing.assert_array_equal(tensor.numpy(), column, strict=True)
    starts = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors if tensor.numel()]
    assert starts == [0, 32, 48, 64]  # multiples of 16


def test_a_buffer_is_filled_again_only_when_the_copy_out_of_it_is_over(staged: Ring) -> None:
    column = np.arange(3, dtype=np.int32)
    first = staged.ring.upload([column], CPU)[0]
    staged.ring.upload([column + 10], CPU)
    assert staged.log == ["record 1", "record 2"]
    third = staged.ring.upload([column + 20], CPU)[0]
    assert staged.log == ["record 1", "record 2", "wait 1", "record 1"]
    assert first.tolist() == [0, 1, 2]
    assert third.tolist() == [20, 21, 22]


def test_a_buffer_grows_with_what_it_must_hold(staged: Ring) -> None:
    assert staged.sizes == [1 << 16, 1 << 16]
    staged.ring.upload([np.zeros(20_000, np.int32)], CPU)
    staged.ring.upload([np.zeros(20, np.int32)], CPU)
    staged.ring.upload([np.zeros(32_768, np.int32)], CPU)
    assert staged.sizes == [1 << 16, 1 << 16, 1 << 17]
