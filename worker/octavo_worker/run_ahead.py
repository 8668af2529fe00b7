"""Steps that are put into a device's queue before the steps before them are answered.

A step that samples leaves its tokens on the device, where the next one finds them, and has them copied to the host; the
host meanwhile knows them as `UNKNOWN_TOKEN`. Pure decode steps are replayed graphs where there are some, all others go
op by op. What becomes of the answers is the executor's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.backend import Backend
from octavo_kernels.decode_state import DecodeColumns
from octavo_worker.batch import build_batch
from octavo_worker.decode_graphs import DecodeGraphs
from octavo_worker.device_table import DeviceTable
from octavo_worker.devices import Device, Download
from octavo_worker.kv_pool import KVPool
from octavo_worker.launched_scores import LaunchedScores, launch_scores
from octavo_worker.models.decoder import Decoder
from octavo_worker.sampler import sample_columns, sample_uploaded
from octavo_worker.sequences import UNKNOWN_TOKEN, IntArray, SequenceTable

# Whatever needs more of a sequence than its last token, or gives more than its next one, is for the host to see.
_NEEDS_HOST = ("has_bans", "has_grammar", "has_adjustments")


@dataclass
class Launch:
    """A step in the device's queue; columns of the sequences that sample.

    indices: in the step; rows, versions: in the table; positions: of the sampled token; tokens: on their way, -1 for a
    row of logits that is not finite; scores: where some asked for them, there before the tokens are; dropped: sequences
    that have failed since.
    """

    indices: IntArray
    rows: IntArray
    versions: IntArray
    positions: IntArray
    tokens: Download
    scores: LaunchedScores | None = None
    dropped: set[int] = field(default_factory=set)


class RunAhead:
    """Launches steps of one executor. graphs: of decode steps, or None."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, backend: Backend, device: Device, graphs: DecodeGraphs | None = None
    ) -> None:
        self._decoder, self._pool, self._backend, self._device = decoder, pool, backend, device
        self._graphs = graphs
        max_blocks = -(-decoder.config.max_model_len // pool.layout.block_size)
        self._known = DeviceTable(max_blocks, device.torch_device)

    def forget(self) -> None:
        """Begins anew, for another sequence table."""
        self._known.forget()

    def can_launch(self, table: SequenceTable, rows: IntArray, positions: IntArray) -> bool:
        """Whether a step over these sequences can go into the queue; otherwise the host must do it by itself, when all
        earlier steps are answered. positions: of the tokens that would be sampled."""
        params = table.params[rows]
        needs_host = params["num_candidates"] > 0
        num_output = positions - params["prompt_len"]  # above 0 from the step on that computes no prompt
        needs_host |= params["has_suppressed"] & (num_output < params["min_tokens"])
        needs_host |= params["return_prompt_logprobs"] & (num_output <= 0)
        for name in _NEEDS_HOST:
            needs_host |= params[name]
        return not (needs_host.any() or self._decoder.needs_prompt_lens)

    def launch(
        self, table: SequenceTable, rows: IntArray, starts: IntArray, counts: IntArray, samples: NDArray[np.bool_]
    ) -> Launch:
        """Puts a step into the queue, and a token of `UNKNOWN_TOKEN` behind the sequences that sample.

        Computes tokens starts[i] to starts[i] + counts[i] of the sequence in rows[i].
        """
        self._known.grow(len(table.params))
        chosen = np.flatnonzero(samples)
        bucket = self._graphs.bucket(len(rows)) if self._graphs is not None and (counts == 1).all() else None
        positions, params = (starts + counts)[chosen], table.params[rows[chosen]]
        scored = np.flatnonzero(params["return_logprobs"])
        last_rows = chosen if bucket is not None else np.cumsum(counts)[chosen] - 1
        others = [rows[chosen], last_rows, scored, *sample_columns(params, positions)]
        if bucket is not None:
            hidden, uploaded = self._replay(table, rows, starts, bucket, others)
        else:
            hidden, uploaded = self._pass(table, rows, starts, counts, others)
        state_rows, logit_rows, scored_rows, *columns = uploaded
        token_ids, logits = self._sample(hidden, state_rows, logit_rows, columns)
        scores = None
        if len(scored):
            num_tops = params["num_top_logprobs"][scored]
            scores = launch_scores(logits, token_ids, scored_rows, scored, num_tops, self._device)
        table.tokens.append_one(rows[chosen], np.full(len(chosen), UNKNOWN_TOKEN, np.int32))
        tokens = self._device.download(token_ids)
        return Launch(chosen, rows[chosen], table.versions[rows[chosen]], positions, tokens, scores)

    def _replay(
        self, table: SequenceTable, rows: IntArray, starts: IntArray, bucket: int, others: list[NDArray[Any]]
    ) -> tuple[Tensor, list[Tensor]]:
        """A pure decode step by its graph. Returns the hidden states and `others` on the device."""
        assert self._graphs is not None
        tokens = table.tokens.pick(rows, starts)
        columns = self._known.columns(table, rows, starts, tokens, bucket)
        uploaded = self._device.upload([*columns, *others])
        count = len(columns)
        self._backend.advance_decode(self._known.state, DecodeColumns(*uploaded[:count]), self._graphs.inputs)
        return self._graphs.replay(bucket), uploaded[count:]

    def _pass(
        self,
        table: SequenceTable,
        rows: IntArray,
        starts: IntArray,
        counts: IntArray,
        others: list[NDArray[Any]],
    ) -> tuple[Tensor, list[Tensor]]:
        """A step of any kind, op by op. Returns the hidden states and `others` on the device."""
        device = self._device
        batch = build_batch(
            table,
            rows,
            starts,
            counts,
            block_size=self._pool.layout.block_size,
            upload=device.upload,
        )
        ends = starts + counts
        last = table.tokens.pick(rows, ends - 1)  # only the last one can be unknown
        unknown = np.flatnonzero(last == UNKNOWN_TOKEN)
        at, state_rows, *uploaded = device.upload([np.cumsum(counts)[unknown] - 1, rows[unknown], *others])
        if len(unknown):
            last_tokens = self._known.state.last_tokens.index_select(0, state_rows)
            batch.token_ids.index_copy_(0, at, last_tokens)
        return self._decoder.hidden(batch.token_ids, batch.attention, self._pool.layers), uploaded

    def _sample(
        self, hidden: Tensor, state_rows: Tensor, logit_rows: Tensor, columns: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Samples, and keeps the tokens for the next step. Returns (S,) int64, -1 where logits are not finite, and the
        logits."""
        if not len(logit_rows):
            return logit_rows, hidden
        logits = self._decoder.logits(hidden, logit_rows)
        token_ids = sample_uploaded(logits, columns, self._backend)
        is_finite = torch.isfinite(logits.sum(dim=1))
        # A row that failed goes on with token 0, until the host has heard of it.
        last_tokens = (token_ids * is_finite).clamp(min=0).to(torch.int32)
        self._known.state.last_tokens.index_copy_(0, state_rows, last_tokens)
        return torch.where(is_finite, token_ids, -1), logits
