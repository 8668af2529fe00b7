"""Grammars: which tokens a sequence may get next so that its output stays in a language, by llguidance.

A sequence's state follows from its output tokens alone: they are consumed when its next mask is computed, so that a
sequence that is sent anew, or forked, needs nothing but them. Masks are computed in a thread of their own, without
holding the interpreter: `GrammarEngine.start` is called before the forward pass, which hides them, and
`PendingMasks.collect` behind it. How masks reach the logits is `bans`' part; what a grammar may be is llguidance's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from octavo_worker.bans import MaskArray, num_words, packed
from octavo_worker.sequences import IntArray, TokenArray
from octavo_worker.tokenizer import TokenizerBundle

# Compiled grammars that are kept for the next request with the same text: about 2 MB for one that took half a second.
_NUM_COMPILED = 64
_MESSAGE_LENGTH = 500
# How often it is looked whether compiling got on, while a step waits for it.
_LOOK_S = 1.0
# A lexer's state takes about 2 kB: at most 200 MB for one grammar. A mask with so many items takes some 30 ms, while
# every sequence of its step waits; ambiguous grammars get beyond. Messages go to clients: without parser internals.
_LIMITS = LLParserLimits(max_lexer_states=100_000, step_max_items=20_000, verbose_errors=False)


class GrammarUnavailableError(ValueError):
    """llguidance cannot work with this tokenizer."""


class SequenceGrammar:
    """How far one sequence is in its grammar. ends: ids that end it.

    has_ended: whether one of them has come. From there on the matcher, which would refuse them, is not asked any more.
    """

    def __init__(self, matcher: Future[LLMatcher], ends: frozenset[int]) -> None:
        self.matcher = matcher
        self.has_ended = False
        self._ends = ends
        self._num_seen = 0

    def unseen(self, output: TokenArray) -> list[int]:
        """The tokens that the matcher is to consume to be behind this output, which begins with the one before."""
        token_ids: list[int] = [] if self.has_ended else output[self._num_seen :].tolist()
        self._num_seen = len(output)
        for index, token_id in enumerate(token_ids):
            if token_id in self._ends:
                self.has_ended = True
                return token_ids[:index]
        return token_ids


@dataclass(frozen=True)
class PendingMasks:
    """Masks that are being computed.

    rows: (n,) the sequences' rows in the table; masks: (n, words) uint32, not to be read before `collect`;
    num_compiled: how many grammars were compiled so far.
    """

    rows: IntArray
    masks: MaskArray
    problems: Future[dict[int, str]]
    num_compiled: Callable[[], int]

    def collect(self, on_progress: Callable[[], None]) -> dict[int, str]:
        """Waits for the masks. Returns index in `rows` to what went wrong, for people; those masks mean nothing.

        on_progress: called now and then while grammars get compiled. A queue of them may take longer than a step that
        hangs is given, each by itself does not.
        """
        num_compiled = self.num_compiled()
        while True:
            try:
                return self.problems.result(_LOOK_S)
            except TimeoutError:
                if num_compiled != (num_compiled := self.num_compiled()):
                    on_progress()


class GrammarEngine:
    """Compiles grammars and computes masks for one tokenizer.

    num_words: words of a mask. Raises GrammarUnavailableError for a tokenizer without an end-of-sequence token, or one
    that llguidance does not read.
    """

    def __init__(self, tokenizer: TokenizerBundle, *, num_threads: int = 1) -> None:
        ends = [end for end in tokenizer.defaults.eos_token_ids if end < tokenizer.size]
        if not ends:
            raise GrammarUnavailableError("the model names no end-of-sequence token, which ends a grammar's output")
        self._ends = frozenset(ends)
        try:
            # All ends are allowed where the grammar may end.
            self._tokenizer = LLTokenizer(tokenizer.tokenizer_json.decode(), n_vocab=tokenizer.size, eos_token=ends)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise GrammarUnavailableError(f"llguidance does not read the tokenizer: {error}") from None
        self.num_words = num_words(self._tokenizer.vocab_size)
        self._end_mask = packed(ends, self.num_words)
        self._executor = LLExecutor(num_threads=num_threads)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_compiled = 0
        # Two threads: masks of running sequences wait for a grammar that another one brings only where it samples.
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._masker = ThreadPoolExecutor(1, "grammar-masks")

    def begin(self, grammar: str) -> SequenceGrammar:
        """A sequence's state before its first output token; compiling goes on in the background. grammar: llguidance's
        JSON or Lark. A text that llguidance refuses shows when the first mask is collected.
        """
        return SequenceGrammar(self._compiler.submit(self._compile, grammar), self._ends)

    def start(self, rows: IntArray, grammars: Sequence[SequenceGrammar], outputs: Sequence[TokenArray]) -> PendingMasks:
        """Starts computing the masks behind these outputs, each of which begins with what was given last time.

        rows: (n,), kept for the caller; outputs: the sequences' output tokens so far.
        """
        unseen = [grammar.unseen(output) for grammar, output in zip(grammars, outputs, strict=True)]
        masks = np.zeros((len(grammars), self.num_words), np.uint32)
        masks[[grammar.has_ended for grammar in grammars]] = self._end_mask
        problems = self._masker.submit(self._fill, list(grammars), unseen, masks)
        return PendingMasks(rows, masks, problems, lambda: self._num_compiled)

    def _fill(self, grammars: list[SequenceGrammar], unseen: list[list[int]], masks: MaskArray) -> dict[int, str]:
        """Consumes tokens and computes masks. Runs in the mask thread."""
        problems: dict[int, str] = {}
        matchers: dict[int, LLMatcher] = {}
        for index, (grammar, token_ids) in enumerate(zip(grammars, unseen, strict=True)):
            if (error := grammar.matcher.exception()) is not None:
                problems[index] = f"the grammar failed: {type(error).__name__} while it was compiled"
                continue
            matcher = matchers[index] = grammar.matcher.result()
            if token_ids and not matcher.is_error():
                matcher.consume_tokens(token_ids)
        sound = [
            (matcher, index)
            for index, matcher in matchers.items()
            if not (grammars[index].has_ended or matcher.is_error())
        ]
        if sound:
            self._executor.unsafe_compute_mask_ptr(sound, masks.ctypes.data, masks.strides[0], len(masks))
        problems.update((index, _message(matcher)) for index, matcher in matchers.items() if matcher.is_error())
        return problems

    def _compile(self, grammar: str) -> LLMatcher:
        """A matcher at the grammar's beginning. Runs in the compiler's thread."""
        known = self._compiled.get(grammar)
        if known is None:
            known = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
            self._num_compiled += 1
            self._compiled[grammar] = known
            while len(self._compiled) > _NUM_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known.deep_copy()


def _message(matcher: LLMatcher) -> str:
    """What went wrong, for people, without the whole grammar, which llguidance may quote."""
    reason = matcher.get_error().replace("<non-verbose/>", "").strip()
    return f"the grammar failed: {reason if len(reason) <= _MESSAGE_LENGTH else reason[:_MESSAGE_LENGTH] + '...'}"
