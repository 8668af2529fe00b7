"""A request inside the router, after the front ends: token ids and checked parameters in, deltas of samples out.

The front ends speak octavo.v1; `inference.py` turns its messages into these and back. Nothing here is validated again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a sample ended. The names are those of OpenAI's finish_reason."""

    STOP = "stop"
    LENGTH = "length"


class EarlyStopping(enum.Enum):
    """When a beam search ends: as octavo.v1.BeamEarlyStopping says."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Beams:
    """Beam search. Scores: the sum of log-probabilities divided by generated length to the power of length_penalty."""

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens a request favours, disfavours or forbids: as octavo.v1.SamplingParams says.

    logit_bias: (token id, bias) by id; bad_words: sequences of token ids that must not appear; grammar: llguidance's
    JSON, empty for none.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""


NO_RULES = TokenRules()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Sample i draws from seed + i (modulo 2^64).

    best_of samples are generated and the n with the highest mean log-probability come back; it is at least n. With
    beams nothing is sampled, and n of the beams come back.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    best_of: int = 1
    beams: Beams | None = None
    rules: TokenRules = NO_RULES


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a sample ends. max_tokens is resolved: it never leads past the context's end. With 0 only the prompt is
    computed."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_in_text: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """What comes back. logprobs is the number of likeliest tokens beside the sampled one; None asks for none.
    prompt_logprobs: the same for the prompt's tokens. shown_special_ids: special tokens that the text shows whatever
    skip_special_tokens says. final_only: everything comes in one update, at the end."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    shown_special_ids: frozenset[int] = frozenset()
    final_only: bool = False


@dataclass(frozen=True, slots=True)
class ResumedSample:
    """What a caller holds of one sample: its token ids, the bytes of text it received, and whether it had ended.

    cumulative_logprob: the sum of the log-probabilities it received, 0 where it asked for none.
    """

    sample_index: int
    token_ids: tuple[int, ...]
    text_byte_count: int
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine takes it.

    prompt_token_ids: at least one; deadline: in the engine clock's seconds (time.monotonic), None for none; cache_salt:
    cached prefixes are shared only between equal salts; tenant: whom the request is accounted to, within its priority;
    resumed: samples that go on behind what their caller holds.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    stopping: Stopping
    output: Output = field(default_factory=Output)
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    tenant: str = ""
    resumed: tuple[ResumedSample, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, and the likeliest tokens with theirs, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SampleDelta:
    """What one sample gained since its last delta. logprobs has one entry a token where they were asked for, else none.

    matched is the stop string, or the stop or end-of-sequence token id, that ended the sample.
    """

    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request took.

    completion counts end-of-sequence tokens; cached counts prompt tokens found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What is new of a request: at most one delta a sample; usage comes with the last update only."""

    deltas: list[SampleDelta]
    usage: Usage | None = None
