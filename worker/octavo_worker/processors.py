"""What changes logits before a token is sampled: bias, penalties, and bans.

The order is bias, repetition penalty, frequency and presence penalties (`LogitProcessors.adjust`), then bans
(`LogitProcessors.bans`): allowed ids, bad words, grammar, suppression. Temperature and filters come behind (`sampler`).
Each row is computed by itself, and rows without such parameters are not looked at. All state follows from a
sequence's tokens, so that it can be dropped and built again at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_worker.bans import NO_BANS, BadWords, Bans, MaskArray, Problem, num_words, packed, unset
from octavo_worker.sequences import IntArray, SequenceTable, TokenArray

if TYPE_CHECKING:
    from octavo_worker.grammar import GrammarEngine, PendingMasks, SequenceGrammar

# Bound of a changed logit. Any temperature and filter can work with it without an overflow, and no model comes near.
_GREATEST = 1e30
# How a sequence without a token left fails, by whether it has a grammar.
_NOTHING_LEFT: dict[bool, Problem] = {
    False: (pb.SEQUENCE_ERROR_CODE_INVALID, "allowed tokens, bad words and suppressed tokens leave no token to sample"),
    True: (pb.SEQUENCE_ERROR_CODE_GRAMMAR, "the grammar and the banned tokens leave no token to sample"),
}


@dataclass(frozen=True)
class ProcessorOptions:
    """One sequence's parameters, prepared.

    bias_ids, biases: (n,), 0 for none; repetition: 1 for none; frequency, presence: 0 for none; unsuppressed: mask of
    what may be sampled while the output is short; left: mask of the allowed ids without the bad words of one token;
    bad_words: the longer ones; grammar: empty for none.
    """

    bias_ids: IntArray
    biases: NDArray[np.float32]
    repetition: float
    frequency: float
    presence: float
    unsuppressed: MaskArray | None
    left: MaskArray | None
    bad_words: BadWords | None
    grammar: str

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0

    @property
    def has_adjustments(self) -> bool:
        """Whether `LogitProcessors.adjust` changes anything."""
        return len(self.bias_ids) > 0 or self.has_penalties

    @property
    def has_bans(self) -> bool:
        """Whether tokens are banned at all times, whatever the grammar."""
        return self.left is not None or self.bad_words is not None

    @property
    def is_used(self) -> bool:
        """Whether there is anything to do for the sequence, now or later."""
        return self.has_adjustments or self.has_bans or self.unsuppressed is not None or bool(self.grammar)


class TokenCounts:
    """How often each token stands in a sequence's output, for those that stand in its prompt or output.

    num_ids: tokens from there on have no logit and are left out; prompt: what is to be known without being counted;
    empty where only the output matters.
    """

    def __init__(self, num_ids: int, prompt: TokenArray) -> None:
        known = np.unique(prompt[prompt < num_ids])
        self.num_output = 0
        self._num_ids = num_ids
        self._size = len(known)
        self._slots = dict(zip(known.tolist(), range(len(known)), strict=True))
        self._ids = np.zeros(max(64, 2 * len(known)), np.int64)
        self._ids[: len(known)] = known
        self._counts = np.zeros(len(self._ids), np.float32)

    @property
    def ids(self) -> IntArray:
        """(n,): the tokens, each once; valid until the next change."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """(n,): how often each stands in the output."""
        return self._counts[: self._size]

    def extend(self, token_ids: TokenArray) -> None:
        """Adds tokens of the output."""
        for token_id in token_ids[token_ids < self._num_ids].tolist():
            slot = self._slots.setdefault(token_id, self._size)
            if slot == self._size:
                self._append(token_id)
            self._counts[slot] += 1
        self.num_output += len(token_ids)

    def _append(self, token_id: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token_id
        self._size += 1


class SequenceProcessors:
    """One sequence's options, and what is known of its tokens so far. Sequences must not share one: see `fresh`."""

    def __init__(self, options: ProcessorOptions) -> None:
        self.options = options
        self._grammar: SequenceGrammar | None = None
        self._counts: TokenCounts | None = None

    def fresh(self) -> SequenceProcessors:
        """The same options for a sequence with other tokens."""
        return SequenceProcessors(self.options)

    def grammar(self, engine: GrammarEngine) -> SequenceGrammar:
        """Its state in its grammar, which is compiled when it is first asked for."""
        if self._grammar is None:
            self._grammar = engine.begin(self.options.grammar)
        return self._grammar

    def counts(self, tokens: TokenArray, prompt_len: int, num_ids: int) -> TokenCounts:
        """The counts of all its tokens below num_ids; the prompt's only where they matter."""
        if self._counts is None:
            self._counts = TokenCounts(num_ids, tokens[: prompt_len if self.options.repetition != 1 else 0])
        self._counts.extend(tokens[prompt_len + self._counts.num_output :])
        return self._counts


class LogitProcessors:
    """Prepares, bans and adjusts for one model. num_sampled: ids that may be sampled; grammars: None for none;
    on_progress: called when grammars that a step waits for get on.
    """

    def __init__(
        self, num_sampled: int, grammars: GrammarEngine | None, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        self._grammars = grammars
        self._on_progress = on_progress
        self._num_words = num_words(num_sampled) if grammars is None else grammars.num_words
        self._valid = packed(range(num_sampled), self._num_words)

    @property
    def has_grammars(self) -> bool:
        """Whether sequences may have a grammar."""
        return self._grammars is not None

    def prepare(self, params: pb.SequenceParams) -> SequenceProcessors | None:
        """What a sequence with these parameters, which `params` has checked, needs; None: nothing. A grammar is
        compiled from now on, while the prompt is computed.
        """
        words = self._num_words
        ends = np.cumsum(params.bad_word_lengths).tolist()
        bad_words = [
            params.bad_word_token_ids[end - length : end]
            for end, length in zip(ends, params.bad_word_lengths, strict=True)
        ]
        longer = [word for word in bad_words if len(word) > 1]
        single = [word[0] for word in bad_words if len(word) == 1]
        left = packed(params.allowed_token_ids, words) if params.allowed_token_ids else None
        if single:
            left = (self._valid if left is None else left) & ~packed(single, words)
        options = ProcessorOptions(
            bias_ids=np.array(params.logit_bias_token_ids, np.int64),
            biases=np.array(params.logit_biases, np.float32),
            repetition=params.repetition_penalty or 1.0,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            unsuppressed=~packed(params.suppressed_token_ids, words) if params.suppressed_token_ids else None,
            left=left,
            bad_words=BadWords(longer) if longer else None,
            grammar=params.grammar,
        )
        if not options.is_used:
            return None
        processors = SequenceProcessors(options)
        if self._grammars is not None and options.grammar:
            processors.grammar(self._grammars)
        return processors

    def start(self, table: SequenceTable, rows: IntArray) -> PendingMasks | None:
        """Starts what can be computed beside the forward pass behind which the sequences in `rows` are sampled."""
        rows = rows[table.params["has_grammar"][rows]]
        if not len(rows) or self._grammars is None:
            return None
        grammars = [table.processors[row].grammar(self._grammars) for row in rows.tolist()]
        return self._grammars.start(rows, grammars, [_output(table, row) for row in rows.tolist()])

    def bans(self, table: SequenceTable, rows: IntArray, positions: IntArray, pending: PendingMasks | None) -> Bans:
        """What may not be sampled at these positions of the sequences in `rows`, (S,), a row of the logits each.

        pending: what `start` gave for these rows or more of them, in the same order.
        """
        params = table.params[rows]
        early = params["has_suppressed"] & (positions - params["prompt_len"] < params["min_tokens"])
        touched = np.flatnonzero(early | params["has_bans"] | params["has_grammar"])
        if not len(touched):
            return NO_BANS
        masks = np.repeat(self._valid[None], len(touched), axis=0)
        problems: dict[int, Problem] = {}
        has_grammar = params["has_grammar"][touched]
        if pending is not None:
            still = np.flatnonzero(np.isin(pending.rows, rows))
            failed = pending.collect(self._on_progress)
            masks[has_grammar] &= pending.masks[still]
            for index, at in zip(still.tolist(), touched[has_grammar].tolist(), strict=True):
                if index in failed:
                    problems[at] = (pb.SEQUENCE_ERROR_CODE_GRAMMAR, failed[index])
        for at in np.flatnonzero(params["has_bans"][touched]).tolist():
            row = int(rows[touched[at]])
            _ban(masks[at], table.processors[row].options, _output(table, row))
        for at in np.flatnonzero(early[touched]).tolist():
            kept = masks[at] & table.processors[int(rows[touched[at]])].options.unsuppressed
            if kept.any() or not has_grammar[at]:  # where it would leave no token, a grammar wins
                masks[at] = kept
        for at in np.flatnonzero(~masks.any(axis=1)).tolist():
            problems.setdefault(int(touched[at]), _NOTHING_LEFT[bool(has_grammar[at])])
        return Bans(touched, masks, problems)

    def adjusts(self, table: SequenceTable, rows: IntArray) -> bool:
        """Whether `adjust` changes any of these rows."""
        return bool(table.params["has_adjustments"][rows].any())

    def adjust(self, logits: Tensor, table: SequenceTable, rows: IntArray) -> None:
        """Adds biases and takes penalties. logits: (S, vocab) fp32, a row for each of `rows`; mutated."""
        touched = np.flatnonzero(table.params["has_adjustments"][rows]).tolist()
        used = [(at, int(rows[at]), table.processors[int(rows[at])]) for at in touched]
        biased = [(at, item.options) for at, _, item in used if len(item.options.bias_ids)]
        if biased:
            add_biases(
                logits,
                np.repeat([at for at, _ in biased], [len(options.bias_ids) for _, options in biased]),
                np.concatenate([options.bias_ids for _, options in biased]),
                np.concatenate([options.biases for _, options in biased]),
            )
        penalized = [(at, row, item) for at, row, item in used if item.options.has_penalties]
        if penalized:
            prompt_lens = table.params["prompt_len"]
            num_ids = logits.shape[1]
            counts = [item.counts(table.tokens.get(row), int(prompt_lens[row]), num_ids) for _, row, item in penalized]
            sizes = [len(item.ids) for item in counts]
            factors = [
                (item.options.repetition, item.options.frequency, item.options.presence) for _, _, item in penalized
            ]
            penalize(
                logits,
                np.repeat([at for at, _, _ in penalized], sizes),
                np.concatenate([item.ids for item in counts]),
                np.concatenate([item.counts for item in counts]),
                np.repeat(np.array(factors, np.float32), sizes, axis=0),
            )


def add_biases(logits: Tensor, rows: IntArray, token_ids: IntArray, biases: NDArray[np.float32]) -> None:
    """Adds biases[i] to logits[rows[i], token_ids[i]], (n,) different places each, in place."""
    row, column, bias = (torch.from_numpy(values).to(logits.device) for values in (rows, token_ids, biases))
    logits[row, column] = (logits[row, column] + bias).clamp(-_GREATEST, _GREATEST)


def penalize(
    logits: Tensor,
    rows: IntArray,
    token_ids: IntArray,
    counts: NDArray[np.float32],
    factors: NDArray[np.float32],
) -> None:
    """Penalizes logits[rows[i], token_ids[i]], (n,) different places each, in place.

    counts: (n,) how often the token stands in the output; factors: (n, 3) repetition r, frequency f and presence p.
    A logit above 0 is divided by r and another multiplied (Keskar et al., CTRL, section 4.1, as transformers does it);
    then f for each time that the token stands in the output, and p if it does, are taken off (OpenAI's API).
    """
    row, column, count, factor = (
        torch.from_numpy(values).to(logits.device) for values in (rows, token_ids, counts, factors)
    )
    repetition, frequency, presence = factor.unbind(1)
    old = logits[row, column]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - frequency * count - presence * (count > 0)
    logits[row, column] = new.clamp(-_GREATEST, _GREATEST)


def _ban(mask: MaskArray, options: ProcessorOptions, output: TokenArray) -> None:
    """Takes what is not allowed, and what would complete a bad word behind the output, out of a mask."""
    if options.left is not None:
        mask &= options.left
    if options.bad_words is not None:
        unset(mask, options.bad_words.completing(output))


def _output(table: SequenceTable, row: int) -> TokenArray:
    """A sequence's output tokens; valid until the table changes."""
    return table.tokens.get(row)[int(table.params["prompt_len"][row]) :]
