"""The device's copy of what it needs of the sequence table: last tokens and block tables, by the same rows.

It is brought up to date by each step with what that step's sequences have that it does not know (`columns`). What is
done with it is `run_ahead`'s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo_kernels.decode_state import PADDING, DecodeState
from octavo_worker.sequences import IntArray, SequenceTable


class DeviceTable:
    """state: the tensors, which are others when the table has grown."""

    def __init__(self, max_blocks: int, device: torch.device) -> None:
        self._max_blocks, self._device = max_blocks, device
        self.forget()

    def forget(self) -> None:
        """Begins anew, for another sequence table."""
        self.state = DecodeState(
            torch.zeros(0, dtype=torch.int32, device=self._device),
            torch.zeros((0, self._max_blocks), dtype=torch.int32, device=self._device),
        )
        self._versions: IntArray = np.zeros(0, np.int64)
        self._num_known: IntArray = np.zeros(0, np.int64)

    def grow(self, num_rows: int) -> None:
        """Makes room for so many rows; what is known of the present ones stays."""
        more = num_rows - len(self._versions)
        if more <= 0:
            return
        old = self.state
        self.state = DecodeState(
            torch.cat([old.last_tokens, old.last_tokens.new_zeros(more)]),
            torch.cat([old.block_tables, old.block_tables.new_zeros((more, self._max_blocks))]),
        )
        self._versions = np.concatenate([self._versions, np.zeros(more, np.int64)])
        self._num_known = np.concatenate([self._num_known, np.zeros(more, np.int64)])

    def columns(
        self, table: SequenceTable, rows: IntArray, positions: IntArray, token_ids: NDArray[np.int32], num_lanes: int
    ) -> list[NDArray[Any]]:
        """What `DecodeColumns` holds for one token of each sequence, in its order, padded to num_lanes. The device is
        taken to know it from here on.

        positions, token_ids: of the tokens that are computed.
        """
        is_other = self._versions[rows] != table.versions[rows]
        known = np.where(is_other, 0, self._num_known[rows])
        # Blocks behind the longest text's last one are never used, and there is no room for them.
        counts = np.minimum(table.blocks.lengths[rows], self._max_blocks) - known
        new_blocks = table.blocks.gather(rows, known, counts)
        self._versions[rows] = table.versions[rows]
        self._num_known[rows] = known + counts
        num_padding = num_lanes - len(rows)
        starts = np.zeros(num_lanes + 1, np.int32)
        np.cumsum(counts, out=starts[1 : len(rows) + 1])
        starts[len(rows) + 1 :] = starts[len(rows)]
        return [
            _padded(rows, num_padding, PADDING),
            _padded(positions, num_padding, 0),
            _padded(token_ids, num_padding, 0),
            _padded(known, num_padding, 0),
            starts,
            new_blocks if len(new_blocks) else np.zeros(1, np.int32),
        ]


def _padded(values: NDArray[np.integer], count: int, value: int) -> NDArray[np.int32]:
    padded = np.full(len(values) + count, value, np.int32)
    padded[: len(values)] = values
    return padded
