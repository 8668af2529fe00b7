"""Chooses tokens from logits, and candidates for beams: small functions without state on (S, vocab) fp32 rows.

Filters hold in the order temperature, top-k, top-p, min-p. Each turns into the least logit that a row keeps, so one
comparison applies them all. Everything is computed row by row: a row's bits never depend on the other rows. The random
numbers are the backend's (`gumbel_argmax`), keyed by seed and position alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.backend import Backend
from octavo_worker.bans import Bans
from octavo_worker.sequences import IntArray

# Below this a temperature is taken as 0: the likeliest token. Dividing by it would overflow long before it mattered.
MIN_TEMPERATURE = 1e-5
# How many of the largest logits are sorted at first, and then, for the rows whose nucleus is larger.
_SORTED_COUNTS = (256, 4096)
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
    device = logits.device
    cool = np.where(params["temperature"] < MIN_TEMPERATURE, np.float32(0), params["temperature"])
    chosen = logits
    vocab = logits.shape[1]
    top_k = np.where(params["top_k"] < vocab, params["top_k"], 0)
    filtered = (cool > 0) & ((top_k > 0) | (params["top_p"] < 1) | (params["min_p"] > 0))
    if filtered.any():
        filtered_rows = torch.from_numpy(np.flatnonzero(filtered)).to(device)
        part = _rows(chosen, filtered_rows)
        least = least_kept(
            part,
            torch.from_numpy(cool[filtered]).to(device),
            torch.from_numpy(top_k[filtered]).to(device),
            torch.from_numpy(params["top_p"][filtered]).to(device),
            torch.from_numpy(params["min_p"][filtered]).to(device),
        )
        part = part.masked_fill(part < least.unsqueeze(1), _MASKED)
        chosen = part if len(part) == len(chosen) else chosen.index_copy(0, filtered_rows, part)
    return backend.gumbel_argmax(
        chosen,
        torch.from_numpy(cool).to(device),
        torch.from_numpy(params["seed"].copy()).to(device),
        torch.from_numpy(positions).to(device),
    )


def least_kept(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """(R,) fp32: the least logit that the filters keep in each row; the likeliest token is always kept.

    logits: (R, vocab); temperatures: (R,) above 0; top_k: (R,) int64, 0 for all; top_p: (R,), 1 for all; min_p: (R,),
    0 for all. Tokens that equal the least are kept too, so that the order of equals never matters.
    """
    greatest = logits.amax(dim=1)
    least = greatest + temperatures * torch.log(min_p)  # log(0) is -inf: no bound
    rows = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1)
    if len(rows):
        bound = _sorted_bound(_rows(logits, rows), temperatures[rows], top_k[rows], top_p[rows])
        least[rows] = torch.maximum(least[rows], bound)
    return torch.minimum(least, greatest)


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    """The given rows, which ascend; not copied where they are all, since copying logits costs more than computing."""
    return values if len(rows) == len(values) else values.index_select(0, rows)


def _sorted_bound(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The bound of top-k and top-p. Sorts only as many logits as the rows turn out to need."""
    vocab = logits.shape[1]
    bound = torch.empty_like(temperatures)
    remaining = torch.arange(len(logits), device=logits.device)
    for count in (*(count for count in _SORTED_COUNTS if count < vocab), vocab):
        last, done = _bound_in_sorted_part(logits, temperatures, top_k, top_p, count)
        bound[remaining[done]] = last[done]
        remaining = remaining[~done]
        if not len(remaining):
            break
        keep = (~done).nonzero().squeeze(1)
        logits, temperatures, top_k, top_p = _rows(logits, keep), temperatures[keep], top_k[keep], top_p[keep]
    return bound


def _bound_in_sorted_part(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """(bounds, whether the `count` largest logits decide them), (R,) each."""
    vocab = logits.shape[1]
    values, ids = logits.topk(count, dim=1)
    k = torch.where(top_k > 0, top_k, vocab)
    inside = k <= count
    by_mass = top_p < 1
    kept = k
    if by_mass.any():
        sums = torch.softmax(logits / temperatures.unsqueeze(1), dim=1).gather(1, ids).double().cumsum(dim=1)
        # Top-p is a share of what top-k left: of the k-th sum, or of 1 without top-k.
        left = torch.where(inside, sums.gather(1, (k.clamp(max=count) - 1).unsqueeze(1)).squeeze(1), 1.0)
        needed = 1 + (sums < (top_p.double() * left).unsqueeze(1)).sum(dim=1)
        kept = torch.where(by_mass, needed.minimum(k), k)
    done = inside | ((top_k == 0) & (kept <= count))
    last = values.gather(1, (kept.clamp(max=count) - 1).unsqueeze(1)).squeeze(1)
    return last, done


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
