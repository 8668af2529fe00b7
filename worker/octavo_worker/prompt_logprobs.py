"""Log-probabilities of the prompt's tokens, for the sequences of a step that ask for them.

The token at position p is scored by the logits behind p - 1, so the last token of a chunk scores the first of the next
one, and a prompt's first token has no score. Logits are made for a bounded number of rows at a time: a whole prompt's
would take gigabytes. Tokens of the output are scored where they are sampled (`executor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.sampler import LogprobRows, finite_rows, log_probabilities
from octavo_worker.sequences import IntArray, SequenceTable

SLICE_ROWS = 64
"""Rows whose logits are in memory at once: 12 MiB in fp32 with a vocabulary of 50,000, and as much for each copy."""


@dataclass(frozen=True)
class ScoredRows:
    """The R rows of a step whose logits score a token of a prompt, one sequence's behind the other's.

    owners: (R,) index of each row's sequence in the step; batch_rows: (R,) its row in the forward pass; positions: (R,)
    the position of the token that it scores; token_ids: (R,) that token; num_tops: (R,) likeliest tokens wanted beside.
    """

    owners: IntArray
    batch_rows: IntArray
    positions: IntArray
    token_ids: NDArray[np.int32]
    num_tops: IntArray

    def among(self, wanted: IntArray) -> ScoredRows:
        """The same where of the pass just these rows are there, (n,), ascending, those that are scored among them."""
        return replace(self, batch_rows=np.searchsorted(wanted, self.batch_rows))


def scored_rows(table: SequenceTable, rows: IntArray, starts: IntArray, counts: IntArray) -> ScoredRows | None:
    """What a step scores, which computes tokens starts[i] to starts[i] + counts[i] of the sequences in rows[i]. None:
    nobody asked, or only output is computed.
    """
    wanted = table.params["return_prompt_logprobs"][rows]
    if not wanted.any():
        return None
    params = table.params[rows]
    num_scored = np.where(wanted, np.minimum(counts, params["prompt_len"] - 1 - starts), 0).clip(min=0)
    if not num_scored.any():
        return None
    owners = np.repeat(np.arange(len(rows)), num_scored)
    offsets = np.arange(len(owners)) - (np.cumsum(num_scored) - num_scored)[owners]
    first_rows = np.cumsum(counts) - counts
    return ScoredRows(
        owners=owners,
        batch_rows=first_rows[owners] + offsets,
        positions=starts[owners] + offsets + 1,
        token_ids=table.tokens.gather(rows, starts + 1, num_scored),
        num_tops=params["num_top_prompt_logprobs"][owners],
    )


def score_prompts(
    scored: ScoredRows, logits_of: Callable[[Tensor], Tensor], device: torch.device, on_progress: Callable[[], None]
) -> tuple[dict[int, pb.PromptLogprobs], set[int]]:
    """The scores by index of their sequence, without sequence ids, and the indices of those whose logits are not
    finite.

    logits_of: gives (R, vocab) fp32 logits for (R,) int64 rows of the forward pass; called with SLICE_ROWS at most, and
    on_progress after each.
    """
    found: dict[int, pb.PromptLogprobs] = {}
    broken: set[int] = set()
    batch_rows = torch.from_numpy(scored.batch_rows).to(device)
    token_ids = torch.from_numpy(scored.token_ids.astype(np.int64)).to(device)
    for begin in range(0, len(scored.owners), SLICE_ROWS):
        part = slice(begin, begin + SLICE_ROWS)
        logits = logits_of(batch_rows[part])
        broken.update(scored.owners[part][~finite_rows(logits)].tolist())
        # A prompt may hold ids that the head has no row for: no text gives them, and they have no probability.
        is_known = token_ids[part] < logits.shape[1]
        rows = log_probabilities(logits, token_ids[part].where(is_known, 0), scored.num_tops[part])
        rows.logprobs.masked_fill_(~is_known, float("-inf"))
        _add(found, scored.owners[part], scored.positions[part], rows)
        on_progress()
    for index in broken:
        del found[index]
    return found, broken


def _add(found: dict[int, pb.PromptLogprobs], owners: IntArray, positions: IntArray, rows: LogprobRows) -> None:
    """Appends a slice's scores to the stretch of each of its sequences."""
    logprobs, counts = rows.logprobs.cpu().numpy(), rows.tops.counts
    top_ids, top_logprobs = rows.tops.ids.cpu().numpy(), rows.tops.logprobs.cpu().numpy()
    inside = np.arange(top_ids.shape[1]) < counts[:, None]
    for index in np.unique(owners).tolist():
        mine = owners == index
        if index not in found:
            found[index] = pb.PromptLogprobs(start_position=int(positions[mine][0]))
        columns = found[index].columns
        columns.logprobs.extend(logprobs[mine].tolist())
        columns.top_counts.extend(counts[mine].tolist())
        columns.top_token_ids.extend(top_ids[mine][inside[mine]].tolist())
        columns.top_logprobs.extend(top_logprobs[mine][inside[mine]].tolist())
