"""Log-probabilities of sampled tokens that come back with them, without the device being waited for in between.

The device finds a few more of the likeliest tokens than are asked for; which of them count, and in which order, is
found out here when they are there, by the rules of `sampler.log_probabilities`. Only where equals go on behind the last
one that came must the device be asked again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.devices import Device, Download
from octavo_worker.sampler import log_probabilities
from octavo_worker.sequences import IntArray

_MORE = 4  # equals in fp32 are rare, but for those at minus infinity


@dataclass(frozen=True)
class LaunchedScores:
    """Scores of R sampled tokens on their way.

    at: (R,) which of the step's sampled tokens; num_tops: (R,) likeliest that are wanted beside each; logits,
    token_ids: on the device, in case it must be asked again; logprobs: of the tokens; values, ids: of the likeliest.
    """

    at: IntArray
    num_tops: IntArray
    logits: Tensor
    token_ids: Tensor
    logprobs: Download
    values: Download
    ids: Download

    def fill(self, columns: pb.LogprobColumns, kept: NDArray[np.bool_]) -> None:
        """Appends the scores of the sampled tokens in `kept`, (S,)."""
        mine = np.flatnonzero(kept[self.at])
        if not len(mine):
            return
        logprobs, values, ids = (part.numpy()[mine] for part in (self.logprobs, self.values, self.ids))
        wanted = np.minimum(self.num_tops[mine], self.logits.shape[1])
        order = np.lexsort((ids, -values))
        values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
        counts = np.minimum((values > -np.inf).sum(axis=1), wanted)
        columns.logprobs.extend(logprobs.tolist())
        for row, (count, asked) in enumerate(zip(counts.tolist(), wanted.tolist(), strict=True)):
            row_ids, row_values = ids[row, :count], values[row, :count]
            if count == asked > 0 and values.shape[1] < self.logits.shape[1] and values[row, -1] == row_values[-1]:
                row_ids, row_values = self._asked_again(int(mine[row]), asked)
            columns.top_counts.append(len(row_ids))
            columns.top_token_ids.extend(row_ids.tolist())
            columns.top_logprobs.extend(row_values.tolist())

    def _asked_again(self, row: int, asked: int) -> tuple[IntArray, NDArray[np.float32]]:
        """The likeliest of one row, looked for among all."""
        tops = log_probabilities(self.logits[row : row + 1], self.token_ids[row : row + 1], np.array([asked])).tops
        count = int(tops.counts[0])
        return tops.ids[0, :count].cpu().numpy(), tops.logprobs[0, :count].cpu().numpy()


def launch_scores(
    logits: Tensor, token_ids: Tensor, on_device: Tensor, at: IntArray, num_tops: IntArray, device: Device
) -> LaunchedScores:
    """Has the scores of some rows computed and copied to the host.

    logits: (S, vocab) fp32, not mutated from here on; token_ids: (S,) int64, of which those of rows that failed may be
    negative; on_device: `at` there.
    """
    if len(at) != len(logits):
        logits, token_ids = logits.index_select(0, on_device), token_ids.index_select(0, on_device)
    token_ids = token_ids.clamp(min=0)
    logprobs = torch.log_softmax(logits, dim=1)
    most = min(int(num_tops.max(initial=0)) + _MORE, logits.shape[1])
    values, ids = logprobs.topk(most, dim=1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return LaunchedScores(at, num_tops, logits, token_ids, *(device.download(part) for part in (chosen, values, ids)))
