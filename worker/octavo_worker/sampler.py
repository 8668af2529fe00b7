"""Chooses tokens from logits, and candidates for beams: small functions without state on (S, vocab) fp32 rows.

Filters hold in the order temperature, top-k, top-p, min-p; they turn into the least logit that a row keeps, which the
backend finds (`least_kept`). Everything is computed row by row: a row's bits never depend on the other rows. The random
numbers are the backend's too (`gumbel_argmax`), keyed by seed and position alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.backend import Backend
from octavo_worker.bans import Bans
from octavo_worker.sequences import MIN_TEMPERATURE, IntArray

_MASKED = float("-inf")


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens of some rows, likeliest first, equals by id.

    counts: (R,) int64, how many each row has; ids: (R, most) int64 and logprobs: (R, most) fp32, the first `counts` of
    each row count.
    """

    counts: IntArray
    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of some rows' tokens. logprobs: (R,) fp32; tops: the likeliest beside them."""

    logprobs: Tensor
    tops: Likeliest


def finite_rows(logits: Tensor) -> NDArray[np.bool_]:
    """(S,): whether a row has neither NaN nor infinity. One pass: both survive in the sum."""
    finite: NDArray[np.bool_] = torch.isfinite(logits.sum(dim=1)).cpu().numpy()
    return finite


def sample(logits: Tensor, params: NDArray[np.void], positions: IntArray, backend: Backend) -> Tensor:
    """One token id a row, (S,) int64.

    logits: (S, vocab) fp32, -inf for banned ids of which each row leaves at least one, not mutated; params: (S,) of
    `PARAMS_DTYPE`; positions: (S,), the index in its sequence of the token that is sampled.
    """
    columns = [torch.from_numpy(column).to(logits.device) for column in sample_columns(params, positions)]
    return sample_uploaded(logits, columns, backend)


def sample_columns(params: NDArray[np.void], positions: IntArray) -> list[NDArray[Any]]:
    """What `sample` needs of its rows, as columns that go to the device: temperatures, seeds, positions, (S,) each, and
    where any row is filtered top_k, top_p and min_p. Decided here, so that the device need not be asked."""
    cool = np.where(params["temperature"] < MIN_TEMPERATURE, np.float32(0), params["temperature"])
    columns = [cool, params["seed"].copy(), positions]
    if ((cool > 0) & ((params["top_k"] > 0) | (params["top_p"] < 1) | (params["min_p"] > 0))).any():
        columns += [params[name].copy() for name in ("top_k", "top_p", "min_p")]
    return columns


def sample_uploaded(logits: Tensor, columns: list[Tensor], backend: Backend) -> Tensor:
    """`sample` with columns that are on the device already."""
    temperatures, seeds, positions, *filters = columns
    least = backend.least_kept(logits, temperatures, *filters) if filters else None
    return backend.gumbel_argmax(logits, temperatures, seeds, positions, least)


def log_probabilities(logits: Tensor, token_ids: Tensor, num_tops: IntArray) -> LogprobRows:
    """Log-probabilities of chosen tokens and of the likeliest ones, of the model's own distribution (temperature 1,
    no filter).

    logits: (R, vocab) fp32; token_ids: (R,) int64; num_tops: (R,), how many likeliest each row wants.
    """
    logprobs = torch.log_softmax(logits, dim=1)
    return LogprobRows(logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), _likeliest(logprobs, num_tops))


def candidates(logits: Tensor, counts: IntArray, bans: Bans, backend: Backend) -> Likeliest:
    """What beams may go on with: the likeliest tokens of the model's own distribution without the banned ones,
    which keep their share of it (as in transformers, whose processors work on log-probabilities).

    logits: (R, vocab) fp32, finite, not mutated; counts: (R,), how many each row wants and gets, unless fewer are
    left.
    """
    logprobs = torch.log_softmax(logits, dim=1)
    bans.apply(logprobs, backend)
    return _likeliest(logprobs, counts)


def _likeliest(logprobs: Tensor, counts: IntArray) -> Likeliest:
    """The counts[i] greatest of each row, or all that are above -inf where those are fewer.

    topk says nothing of the order of equals, nor which of them it takes at the end: rows where that matters are looked
    through for all equals.
    """
    device, (num_rows, vocab) = logprobs.device, logprobs.shape
    most = min(int(counts.max(initial=0)), vocab)
    wanted = torch.from_numpy(np.minimum(counts, most)).to(device)
    values, columns = logprobs.topk(min(most + 1, vocab), dim=1)  # one more, to see whether the last has an equal
    bounds = values.gather(1, (wanted - 1).clamp(min=0).unsqueeze(1))
    is_cut = (wanted > 0) & (((values >= bounds) & (values > _MASKED)).sum(dim=1) > wanted)
    rows, ranks = ((values > _MASKED) & ~is_cut.unsqueeze(1)).nonzero(as_tuple=True)
    cut = is_cut.nonzero().squeeze(1)
    cut_rows, cut_columns = (logprobs[cut] >= bounds[cut]).nonzero(as_tuple=True)
    rows, columns = torch.cat([rows, cut[cut_rows]]), torch.cat([columns[rows, ranks], cut_columns])
    found = logprobs[rows, columns]
    order = columns.argsort()
    for key, descending in ((found, True), (rows, False)):  # stable sorts: the last one goes before the others
        order = order[key[order].argsort(descending=descending, stable=True)]
    rows, columns, found = rows[order], columns[order], found[order]
    per_row = torch.bincount(rows, minlength=num_rows)
    ranks = torch.arange(len(rows), device=device) - (per_row.cumsum(0) - per_row)[rows]
    kept = ranks < wanted[rows]
    ids = torch.zeros((num_rows, most), dtype=torch.int64, device=device)
    best = torch.full((num_rows, most), _MASKED, dtype=logprobs.dtype, device=device)
    ids[rows[kept], ranks[kept]] = columns[kept]
    best[rows[kept], ranks[kept]] = found[kept]
    return Likeliest(torch.minimum(per_row, wanted).cpu().numpy(), ids, best)
