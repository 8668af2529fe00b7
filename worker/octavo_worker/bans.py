"""Which tokens may not be sampled: allowed ids, bad words, suppression and grammars, brought together as packed masks.

A mask is a row of uint32 words, in which bit v % 32 of word v // 32 says whether id v may be sampled. Whether anything
is left shows on the masks, before they reach the logits (`Backend.ban_tokens`): a row without a token never gets there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels.backend import Backend
from octavo_worker.sequences import IntArray, TokenArray

MaskArray = NDArray[np.uint32]
# Why a sequence cannot go on: the kind of its failure, and what happened, for people.
Problem = tuple[pb.SequenceErrorCode, str]
# In a prefix: fits every token. No token has this id, nor that of a place before the output's beginning.
_ANY, _BEFORE = -2, -1


def num_words(num_ids: int) -> int:
    """Words of a mask over so many ids."""
    return -(-num_ids // 32)


def packed(token_ids: Iterable[int] | IntArray, words: int) -> MaskArray:
    """(words,): the mask in which just these ids are set."""
    bits = np.zeros(words * 32, np.bool_)
    bits[np.fromiter(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def unset(mask: MaskArray, token_ids: IntArray) -> None:
    """Takes ids out of a mask, in place; any of them may be named twice."""
    np.bitwise_and.at(mask, token_ids >> 5, ~(np.uint32(1) << (token_ids & 31).astype(np.uint32)))


class BadWords:
    """Sequences of two or more tokens whose last token is banned while the output ends in the others."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        longest = max(len(word) for word in words) - 1
        self._prefixes = np.full((len(words), longest), _ANY, np.int64)  # the last token stands at the right
        for row, word in zip(self._prefixes, words, strict=True):
            row[longest - len(word) + 1 :] = word[:-1]
        self._lasts = np.array([word[-1] for word in words], np.int64)

    def completing(self, output: TokenArray) -> IntArray:
        """The ids that would complete one of the words behind this output."""
        longest = self._prefixes.shape[1]
        tail = np.full(longest, _BEFORE, np.int64)
        known = output[len(output) - min(len(output), longest) :]
        tail[longest - len(known) :] = known
        completing: IntArray = self._lasts[((self._prefixes == tail) | (self._prefixes == _ANY)).all(axis=1)]
        return completing


@dataclass(frozen=True)
class Bans:
    """The masks of some rows of a step.

    rows: (n,) int64, which rows of the logits, ascending; masks: (n, words); problems: row to why it has no token left;
    its mask means nothing.
    """

    rows: IntArray
    masks: MaskArray
    problems: dict[int, Problem] = field(default_factory=dict)

    def take(self, kept: NDArray[np.bool_]) -> Bans:
        """Those of the rows in `kept`, (S,), numbered anew, without problems."""
        if not len(self.rows) or kept.all():
            return Bans(self.rows, self.masks)
        mine = kept[self.rows]
        return Bans((np.cumsum(kept) - 1)[self.rows[mine]], self.masks[mine])

    def apply(self, logits: Tensor, backend: Backend) -> None:
        """Sets the logits, (S, vocab) fp32, of banned tokens to -inf, in place."""
        if len(self.rows):
            masks = torch.from_numpy(self.masks.view(np.int32)).to(logits.device)
            backend.ban_tokens(logits, torch.from_numpy(self.rows).to(logits.device), masks)


NO_BANS = Bans(np.zeros(0, np.int64), np.zeros((0, 0), np.uint32))
