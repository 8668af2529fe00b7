"""Top-k, top-p and min-p as one bound a row, in plain torch: what `Backend.least_kept` gives where nothing faster does.

Sorts only as many of a row's logits as it turns out to need.
"""

from __future__ import annotations

import torch
from torch import Tensor

# How many of the largest logits are sorted at first, and then, for the rows whose nucleus is larger.
_SORTED_COUNTS = (256, 4096)


def least_kept(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `Backend.least_kept`."""
    least = torch.full_like(temperatures, float("-inf"))
    top_k = torch.where(top_k < logits.shape[1], top_k, 0)
    rows = ((temperatures > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero().squeeze(1)
    if len(rows):
        part = _rows(logits, rows)
        least[rows] = _least(part, temperatures[rows], top_k[rows], top_p[rows], min_p[rows])
    return least


def without_least(logits: Tensor, least: Tensor | None) -> Tensor:
    """A copy in which what is below a row's least is -inf; the logits themselves where there is no least."""
    return logits if least is None else logits.masked_fill(logits < least.unsqueeze(1), float("-inf"))


def _least(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The bounds of rows that have filters."""
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
