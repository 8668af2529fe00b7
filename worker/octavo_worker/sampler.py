"""Chooses tokens from logits: small functions without state on (S, vocab) fp32 rows.

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
from octavo_worker.sequences import IntArray

# Below this a temperature is taken as 0: the likeliest token. Dividing by it would overflow long before it mattered.
MIN_TEMPERATURE = 1e-5
# How many of the largest logits are sorted at first, and then, for the rows whose nucleus is larger.
_SORTED_COUNTS = (256, 4096)
_MASKED = float("-inf")


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of some rows' tokens.

    logprobs: (R,) fp32; num_tops: (R,) int64, how many likeliest are wanted; top_ids, top_logprobs: (R, most wanted),
    likeliest first.
    """

    logprobs: Tensor
    num_tops: IntArray
    top_ids: Tensor
    top_logprobs: Tensor


def finite_rows(logits: Tensor) -> NDArray[np.bool_]:
    """(S,): whether a row has neither NaN nor infinity. One pass: both survive in the sum."""
    finite: NDArray[np.bool_] = torch.isfinite(logits.sum(dim=1)).cpu().numpy()
    return finite


def sample(
    logits: Tensor, params: NDArray[np.void], positions: IntArray, suppressed: dict[int, IntArray], backend: Backend
) -> Tensor:
    """One token id a row, (S,) int64.

    logits: (S, vocab) fp32, not mutated; params: (S,) of `PARAMS_DTYPE`; positions: (S,), the index in its sequence
    of the token that is sampled; suppressed: row to the ids that it must not give, which leave at least one.
    """
    device = logits.device
    cool = np.where(params["temperature"] < MIN_TEMPERATURE, np.float32(0), params["temperature"])
    chosen = logits
    if suppressed:
        chosen = logits.clone()
        for row, token_ids in suppressed.items():
            chosen[row, torch.from_numpy(token_ids).to(device)] = _MASKED
    vocab = logits.shape[1]
    top_k = np.where(params["top_k"] < vocab, params["top_k"], 0)
    filtered = (cool > 0) & ((top_k > 0) | (params["top_p"] < 1) | (params["min_p"] > 0))
    if filtered.any():
        rows = torch.from_numpy(np.flatnonzero(filtered)).to(device)
        part = chosen.index_select(0, rows)
        least = least_kept(
            part,
            torch.from_numpy(cool[filtered]).to(device),
            torch.from_numpy(top_k[filtered]).to(device),
            torch.from_numpy(params["top_p"][filtered]).to(device),
            torch.from_numpy(params["min_p"][filtered]).to(device),
        )
        chosen = chosen.index_copy(0, rows, part.masked_fill(part < least.unsqueeze(1), _MASKED))
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
    cut = (top_k > 0) | (top_p < 1)
    if cut.any():
        rows = cut.nonzero().squeeze(1)
        part = logits.index_select(0, rows)
        bound = _sorted_bound(part, temperatures[rows], top_k[rows], top_p[rows])
        least[rows] = torch.maximum(least[rows], bound)
    return torch.minimum(least, greatest)


def _sorted_bound(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The bound of top-k and top-p. Sorts only as many logits as the rows turn out to need."""
    vocab = logits.shape[1]
    probabilities = torch.softmax(logits / temperatures.unsqueeze(1), dim=1)
    bound = torch.empty_like(temperatures)
    open_rows = torch.arange(len(logits), device=logits.device)
    for count in (*(count for count in _SORTED_COUNTS if count < vocab), vocab):
        values, ids = logits[open_rows].topk(count, dim=1)
        sums = probabilities[open_rows].gather(1, ids).double().cumsum(dim=1)
        k = torch.where(top_k[open_rows] > 0, top_k[open_rows], vocab)
        inside = k <= count  # whether top-k is decided by the sorted part
        total = torch.where(inside, sums.gather(1, (k.clamp(max=count) - 1).unsqueeze(1)).squeeze(1), 1.0)
        mass = top_p[open_rows].double() * total
        kept = 1 + (sums < mass.unsqueeze(1)).sum(dim=1)  # the first whose sum reaches the mass is the last kept
        kept = torch.where(top_p[open_rows] < 1, kept, vocab).minimum(k).clamp(max=vocab)
        done = inside | ((kept <= count) & (top_k[open_rows] == 0))
        last = values.gather(1, (kept.clamp(max=count) - 1).unsqueeze(1)).squeeze(1)
        bound[open_rows] = torch.where(done, last, bound[open_rows])
        open_rows = open_rows[~done]
        if not len(open_rows):
            break
    return bound


def log_probabilities(logits: Tensor, token_ids: Tensor, num_tops: IntArray) -> LogprobRows:
    """Log-probabilities of chosen tokens and of the likeliest ones, of the model's own distribution (temperature 1,
    no filter).

    logits: (R, vocab) fp32; token_ids: (R,) int64; num_tops: (R,), how many likeliest each row wants.
    """
    logprobs = torch.log_softmax(logits, dim=1)
    most = min(int(num_tops.max(initial=0)), logits.shape[1])
    top = logprobs.topk(most, dim=1)
    return LogprobRows(
        logprobs=logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1),
        num_tops=np.minimum(num_tops, most),
        top_ids=top.indices,
        top_logprobs=top.values,
    )
