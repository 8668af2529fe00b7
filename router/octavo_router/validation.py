"""Checks a GenerateRequest against the contract and turns its parameters into the engine's.

Both front ends come through here, so a value is refused for the same reason whichever way it arrived. Every error names
the field, the value and what is allowed. What a pool can hold is the engine's matter, prompts are `prompts.py`'s.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from octavo.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import sampling_pb2
from octavo.worker.v1 import worker_pb2
from octavo_router.request import Beams, EarlyStopping, Output, Sampling, Stopping

MAX_SAMPLES = 128
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 5
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_REQUEST_ID_LENGTH = 256
MAX_TENANT_LENGTH = 256

# Fields of the contract, each with a look whether a request uses it. Neutral values, which ask for nothing, pass.
Uses = tuple[tuple[str, Callable[[pb.GenerateRequest], Any]], ...]

_NOT_OFFERED: Uses = (("adapter", lambda r: r.adapter),)

_TOKEN_RULES: Uses = (
    ("sampling.presence_penalty", lambda r: r.sampling.presence_penalty != 0),
    ("sampling.frequency_penalty", lambda r: r.sampling.frequency_penalty != 0),
    ("sampling.repetition_penalty", lambda r: _set(r.sampling, "repetition_penalty", 1)),
    ("sampling.logit_bias", lambda r: r.sampling.logit_bias),
    ("sampling.allowed_token_ids", lambda r: r.sampling.allowed_token_ids),
    ("sampling.bad_words", lambda r: r.sampling.bad_words),
)
_GRAMMAR: Uses = (("sampling.grammar", lambda r: r.sampling.HasField("grammar")),)

# What a worker may lack.
_CAPABILITIES: tuple[tuple[worker_pb2.Capability, Uses], ...] = (
    (worker_pb2.CAPABILITY_LOGIT_PROCESSORS, _TOKEN_RULES),
    (worker_pb2.CAPABILITY_GRAMMARS, _GRAMMAR),
    (worker_pb2.CAPABILITY_BEAMS, (("sampling.beam_search", lambda r: r.sampling.HasField("beam_search")),)),
    (
        worker_pb2.CAPABILITY_PROMPT_LOGPROBS,
        (("output.prompt_logprobs", lambda r: r.output.HasField("prompt_logprobs")),),
    ),
)

# What beam search does without: stop strings and log-probabilities are properties of samples, and beams are scored by
# the model's own probabilities.
_NOT_OFFERED_WITH_BEAMS: Uses = (
    ("stop.stop", lambda r: r.stop.stop),
    ("output.logprobs", lambda r: r.output.HasField("logprobs")),
    *_TOKEN_RULES,
    *_GRAMMAR,
)

_EARLY_STOPPING = {
    sampling_pb2.BEAM_EARLY_STOPPING_UNSPECIFIED: EarlyStopping.FALSE,
    sampling_pb2.BEAM_EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    sampling_pb2.BEAM_EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    sampling_pb2.BEAM_EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def refuse_unsupported(request: pb.GenerateRequest, capabilities: Container[int]) -> None:
    """Raises UnsupportedError, naming the field, where a request uses a part of the contract that is not offered.

    capabilities: the worker's.
    """
    for field, is_used in _NOT_OFFERED:
        if is_used(request):
            raise unsupported(field)
    for capability, uses in _CAPABILITIES:
        if capability in capabilities:
            continue
        for field, is_used in uses:
            if is_used(request):
                raise UnsupportedError(
                    f"{field.rpartition('.')[2]} is not offered by this server: its worker lacks "
                    f"{worker_pb2.Capability.Name(capability)}; leave it out",
                    field=field,
                )
    if request.sampling.HasField("grammar") and request.stop.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos together with a grammar has no end: where the grammar ends, only an end-of-sequence token is "
            "possible; leave one of them out",
            field="stop.ignore_eos",
        )
    if request.sampling.HasField("beam_search"):
        for field, is_used in _NOT_OFFERED_WITH_BEAMS:
            if is_used(request):
                name = field.rpartition(".")[2]
                raise UnsupportedError(
                    f"{name} together with beam search is not offered by this server; leave one of them out",
                    field=field,
                )


def unsupported(field: str) -> UnsupportedError:
    """The error for a field, given by its path in the contract, that this server does not offer."""
    return UnsupportedError(f"{field.rpartition('.')[2]} is not offered by this server; leave it out", field=field)


def is_prompt_only(request: pb.GenerateRequest) -> bool:
    """Whether a request asks for its prompt alone: max_tokens is 0, and something of the prompt comes back.

    Raises InvalidRequestError for max_tokens 0 where nothing would come back, or samples would have to be compared.
    """
    if not request.stop.HasField("max_tokens") or request.stop.max_tokens:
        return False
    if not request.output.echo and not request.output.HasField("prompt_logprobs"):
        raise _out_of_range("stop.max_tokens", 0, "at least 1, or 0 with echo or prompt_logprobs")
    sampling = request.sampling
    if sampling.HasField("beam_search") or sampling.best_of > max(sampling.n, 1):
        raise _out_of_range("stop.max_tokens", 0, "at least 1 with best_of above n and with beam search")
    return True


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError for a request_id that would spoil a log: too long, or with control characters."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH or not request_id.isprintable():
        raise InvalidRequestError(
            f"request_id is {request_id[:40]!r}; it must be printable and at most {MAX_REQUEST_ID_LENGTH} characters",
            field="request_id",
        )


def check_tenant(tenant: str) -> None:
    """Raises InvalidRequestError for a name that is too long to be one."""
    if len(tenant) > MAX_TENANT_LENGTH:
        raise InvalidRequestError(
            f"tenant has {len(tenant)} characters; the limit is {MAX_TENANT_LENGTH}", field="tenant"
        )


def sampling_of(message: sampling_pb2.SamplingParams, defaults: Sampling) -> Sampling:
    """How tokens are chosen. Unset fields take the model's defaults; a seed that is not given is drawn.

    Raises InvalidRequestError for a value out of its range.
    """
    n = message.n if message.HasField("n") else 1
    in_range("sampling.n", n, 1, MAX_SAMPLES)
    # 63 bits, so that a drawn seed is a positive number in every client language.
    seed = message.seed if message.HasField("seed") else secrets.randbits(63)
    temperature = message.temperature if message.HasField("temperature") else defaults.temperature
    in_range("sampling.temperature", temperature, 0, 2)
    top_p = message.top_p if message.HasField("top_p") else defaults.top_p
    if not 0 < top_p <= 1:
        raise _out_of_range("sampling.top_p", top_p, "above 0 and at most 1")
    top_k = message.top_k if message.HasField("top_k") else defaults.top_k
    if top_k < -1:
        raise _out_of_range("sampling.top_k", top_k, "at least 1, or 0 or -1 for all tokens")
    min_p = message.min_p if message.HasField("min_p") else defaults.min_p
    in_range("sampling.min_p", min_p, 0, 1)
    if message.HasField("beam_search"):
        return Sampling(temperature=0.0, seed=seed, n=n, best_of=n, beams=_beams_of(message, n))
    best_of = message.best_of if message.HasField("best_of") else n
    if not n <= best_of <= MAX_SAMPLES:
        raise _out_of_range("sampling.best_of", best_of, f"at least n, which is {n}, and at most {MAX_SAMPLES}")
    return Sampling(
        temperature=temperature, top_p=top_p, top_k=max(top_k, 0), min_p=min_p, seed=seed, n=n, best_of=best_of
    )


def _beams_of(message: sampling_pb2.SamplingParams, n: int) -> Beams:
    """The beam search that a request asks for. Raises InvalidRequestError for what does not go with it."""
    beams = message.beam_search
    in_range("sampling.beam_search.beam_width", beams.beam_width, 1, MAX_BEAM_WIDTH)
    if n > beams.beam_width:
        raise _out_of_range("sampling.n", n, f"at most beam_width, which is {beams.beam_width}, with beam search")
    # A temperature of 1 leaves probabilities as they are, and one of 0 asks for the likeliest: beams do both.
    for field, is_neutral, allowed in (
        ("temperature", message.temperature in (0, 1), "0 or 1, or left out"),
        ("top_p", not message.HasField("top_p") or message.top_p == 1, "1, or left out"),
        ("top_k", message.top_k in (0, -1), "0 or -1, or left out"),
        ("min_p", message.min_p == 0, "0, or left out"),
        ("best_of", not message.HasField("best_of"), "left out: n of the beams come back"),
    ):
        if not is_neutral:
            path = f"sampling.{field}"
            raise _out_of_range(path, getattr(message, field), f"{allowed}, with beam search, which samples nothing")
    length_penalty = beams.length_penalty if beams.HasField("length_penalty") else 1.0
    in_range("sampling.beam_search.length_penalty", length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if beams.early_stopping not in _EARLY_STOPPING:
        raise _out_of_range(
            "sampling.beam_search.early_stopping", beams.early_stopping, "one of the values of BeamEarlyStopping"
        )
    return Beams(beams.beam_width, length_penalty, _EARLY_STOPPING[beams.early_stopping])


def stopping_of(
    message: sampling_pb2.StopConditions,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    is_prompt_only: bool = False,
) -> Stopping:
    """When samples end. Unset max_tokens lets them run to the context's end; 0 is for `is_prompt_only`.

    Raises ContextLengthError where prompt and max_tokens exceed max_model_len: nothing is capped or cut. Raises
    InvalidRequestError for other values out of their range.
    """
    check_prompt_length(num_prompt_tokens, max_model_len, is_prompt_only=is_prompt_only)
    max_tokens = max_model_len - num_prompt_tokens
    if message.HasField("max_tokens"):
        if message.max_tokens < 1 and not is_prompt_only:
            raise _out_of_range("stop.max_tokens", message.max_tokens, "at least 1")
        if message.max_tokens > max_tokens:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {message.max_tokens}, together "
                f"{num_prompt_tokens + message.max_tokens}; at most {max_model_len} are possible: shorten the prompt "
                f"or ask for at most {max_tokens} tokens",
                field="stop.max_tokens",
            )
        max_tokens = message.max_tokens
    if message.min_tokens > max_tokens:
        raise _out_of_range("stop.min_tokens", message.min_tokens, f"at most max_tokens, which is {max_tokens}")
    _check_stop_strings(message.stop)
    if len(message.stop_token_ids) > vocab_size:
        raise InvalidRequestError(
            f"stop_token_ids has {len(message.stop_token_ids)} ids; this model has {vocab_size} tokens",
            field="stop.stop_token_ids",
        )
    check_token_ids("stop.stop_token_ids", message.stop_token_ids, vocab_size)
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_in_text=message.include_stop_in_text,
    )


def output_of(message: sampling_pb2.OutputOptions) -> Output:
    """What comes back. Raises InvalidRequestError for too many log-probabilities."""
    logprobs = message.logprobs if message.HasField("logprobs") else None
    if logprobs is not None:
        in_range("output.logprobs", logprobs, 0, MAX_LOGPROBS)
    prompt_logprobs = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    if prompt_logprobs is not None:
        in_range("output.prompt_logprobs", prompt_logprobs, 0, MAX_LOGPROBS)
    return Output(
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        spaces_between_special_tokens=message.spaces_between_special_tokens,
        final_only=message.final_only,
    )


def check_prompt_length(
    num_tokens: int, max_model_len: int, *, at_least: bool = False, is_prompt_only: bool = False
) -> None:
    """Raises ContextLengthError where a prompt leaves no room for one token, which is not needed for `is_prompt_only`.
    at_least: num_tokens is a lower bound.
    """
    longest = max_model_len if is_prompt_only else max_model_len - 1
    if num_tokens > longest:
        raise ContextLengthError(
            f"the prompt has {'at least ' if at_least else ''}{num_tokens} tokens; at most {max_model_len} are "
            f"possible, prompt and output together: shorten the prompt to at most {longest} tokens",
            field="prompt",
        )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequestError that names the first id outside the vocabulary. Ids are unsigned by their type."""
    if max(token_ids, default=0) < vocab_size:
        return
    token_id = next(token_id for token_id in token_ids if token_id >= vocab_size)
    raise InvalidRequestError(
        f"{field.rpartition('.')[2]} holds {token_id}; token ids of this model are from 0 to {vocab_size - 1}",
        field=field,
    )


def _check_stop_strings(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are possible", field="stop.stop"
        )
    for text in stop:
        if not text:
            raise InvalidRequestError(
                "stop holds an empty string; every stop string must have a character", field="stop.stop"
            )
        if len(text) > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"stop holds a string of {len(text)} characters; at most {MAX_STOP_LENGTH} are possible",
                field="stop.stop",
            )


def in_range(field: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequestError for a value of a field, given by its path, that is not from low to high."""
    if math.isnan(value) or not low <= value <= high:
        raise _out_of_range(field, value, f"from {low:g} to {high:g}")


def _out_of_range(field: str, value: float, allowed: str) -> InvalidRequestError:
    # A float of the contract has 32 bits: more digits than %g shows are not the caller's.
    shown = f"{value:g}" if isinstance(value, float) else value
    return InvalidRequestError(f"{field.rpartition('.')[2]} is {shown}; it must be {allowed}", field=field)


def _set(message: Any, field: str, neutral: float) -> bool:
    return bool(message.HasField(field) and getattr(message, field) != neutral)
