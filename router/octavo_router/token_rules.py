"""Which tokens a request favours or forbids: penalties, biases, allowed tokens and bad words, checked and resolved.

Bad words become token ids here; `prompts.py` does that off the event loop. Grammars are `grammar.py`'s, what the rules
do to logits is the worker's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequestError
from octavo.v1 import sampling_pb2
from octavo_router.request import NO_RULES, Stopping, TokenRules
from octavo_router.validation import check_token_ids, in_range

if TYPE_CHECKING:
    from octavo_router.tokenizer import Tokenizer

MAX_PENALTY = 2
MIN_REPETITION_PENALTY = 0.0099999997  # 0.01 in the 32 bits that a float of the contract has is a little less
MAX_REPETITION_PENALTY = 100
MAX_BIAS = 100
MAX_BIASED_TOKENS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256

_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
)


def rules_of(message: sampling_pb2.SamplingParams, *, vocab_size: int) -> TokenRules:
    """The rules of a request, without bad words and a grammar. Raises InvalidRequestError for a value out of its range.

    Neutral values give NO_RULES.
    """
    if not any(descriptor.name in _FIELDS for descriptor, _ in message.ListFields()):
        return NO_RULES
    in_range("sampling.presence_penalty", message.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    in_range("sampling.frequency_penalty", message.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    in_range("sampling.repetition_penalty", repetition, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    return TokenRules(
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=_biases(message, vocab_size),
        allowed_token_ids=_allowed(message.allowed_token_ids, vocab_size),
    )


def check_some_token_remains(rules: TokenRules, stopping: Stopping, eos_token_ids: frozenset[int]) -> None:
    """Raises InvalidRequestError where min_tokens forbids all that is allowed."""
    if not rules.allowed_token_ids or not stopping.min_tokens:
        return
    ends = stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | eos_token_ids
    if ends.issuperset(rules.allowed_token_ids):
        raise InvalidRequestError(
            f"allowed_token_ids holds only tokens that end a sample, which min_tokens, {stopping.min_tokens}, forbids "
            "at first; allow another token, or set min_tokens to 0",
            field="sampling.allowed_token_ids",
        )


def check_bad_words(words: Sequence[str]) -> None:
    """Raises InvalidRequestError for too many bad words, too long ones, and blank ones."""
    field = "sampling.bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS} are possible", field=field
        )
    for word in words:
        if not word.strip():
            raise InvalidRequestError(
                f"bad_words holds {word[:40]!r}; every word must have a character that is not blank", field=field
            )
        if len(word) > MAX_BAD_WORD_LENGTH:
            raise InvalidRequestError(
                f"bad_words holds a word of {len(word)} characters; at most {MAX_BAD_WORD_LENGTH} are possible",
                field=field,
            )


def bad_word_token_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens that spell checked bad words at the beginning of a text and behind a blank.

    As vLLM has it: a word is forbidden as it is tokenized by itself, and with a space before it, where that is not the
    same tokens behind a blank. A word within a longer one, which has tokens of its own, stays possible.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        alone = tuple(tokenizer.encode(bare, add_special_tokens=False))
        behind_space = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
        if not alone:
            raise InvalidRequestError(
                f"bad_words holds {word[:40]!r}, of which this model's tokenizer leaves nothing; leave it out",
                field="sampling.bad_words",
            )
        sequences[alone] = None
        if behind_space[-len(alone) :] != alone:
            sequences[behind_space] = None
    return tuple(sequences)


def _biases(message: sampling_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    biases = message.logit_bias
    if len(biases) > MAX_BIASED_TOKENS:
        raise InvalidRequestError(
            f"logit_bias has {len(biases)} tokens; at most {MAX_BIASED_TOKENS} are possible", field=field
        )
    check_token_ids(field, biases, vocab_size)
    for token_id, bias in biases.items():
        if math.isnan(bias) or abs(bias) > MAX_BIAS:
            raise InvalidRequestError(
                f"logit_bias of token {token_id} is {bias:g}; it must be from {-MAX_BIAS} to {MAX_BIAS}", field=field
            )
    return tuple(sorted((token_id, bias) for token_id, bias in biases.items() if bias))


def _allowed(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    field = "sampling.allowed_token_ids"
    if len(token_ids) > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(token_ids)} ids; this model has {vocab_size} tokens", field=field
        )
    check_token_ids(field, token_ids, vocab_size)
    return tuple(sorted(set(token_ids)))
