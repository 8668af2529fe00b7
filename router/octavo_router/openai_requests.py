"""Turns OpenAI bodies into GenerateRequests, and names of the contract's fields back into theirs.

Values are checked here only where the contract's types could not hold them; `validation.py` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf import json_format

from octavo.errors import InvalidRequestError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import sampling_pb2
from octavo_router.openai_body import shown
from octavo_router.openai_grammar import grammar_of
from octavo_router.openai_schema import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    TokenizeBody,
)
from octavo_router.openai_tools import add_choice, add_tools, check_no_legacy, tool_param_of

_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1
_DEFAULT_COMPLETION_TOKENS = 16

MAX_PROMPTS = 2048
_MAX_COPIED_BYTES = 64 << 20

# Fields of the contract whose name in OpenAI's API is not the last part of theirs.
_PARAMS = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "messages",
    "include_stop_in_text": "include_stop_str_in_output",
    "template_variables": "chat_template_kwargs",
    "tenant": "user",
    "grammar": "response_format",
    "grammar.json_object": "response_format",
    "grammar.json_schema": "response_format",
    "grammar.regex": "structured_outputs",
    "grammar.choices": "structured_outputs",
    "grammar.lark": "structured_outputs",
    "beam_search.beam_width": "beam_width",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.early_stopping": "early_stopping",
}

_EARLY_STOPPING: dict[bool | str, sampling_pb2.BeamEarlyStopping] = {
    False: sampling_pb2.BEAM_EARLY_STOPPING_FALSE,
    True: sampling_pb2.BEAM_EARLY_STOPPING_TRUE,
    "never": sampling_pb2.BEAM_EARLY_STOPPING_NEVER,
}


def completion_requests(body: CompletionBody, request_id: str) -> list[pb.GenerateRequest]:
    """A request for each prompt of a completion, in order.

    Raises InvalidRequestError for a value that cannot be meant and UnsupportedError for a field that is not offered.
    """
    body.check_offered()
    if not body.prompt:
        raise InvalidRequestError("prompt is an empty list; give at least one prompt", field="prompt")
    if len(body.prompt) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt has {len(body.prompt)} prompts; at most {MAX_PROMPTS} are possible", field="prompt"
        )
    shared = _shared_request(body)
    # None is enough where the prompt comes back.
    least = 0 if body.echo or body.prompt_logprobs is not None else 1
    shared.stop.max_tokens = _integer("max_tokens", body.max_tokens, least, default=_DEFAULT_COMPLETION_TOKENS)
    shared.output.echo = bool(body.echo)
    if body.logprobs is not None:
        shared.output.logprobs = _integer("logprobs", body.logprobs, 0)
        if body.echo:
            # The echoed prompt has them too; what is asked for by prompt_logprobs may be more or less.
            shared.output.prompt_logprobs = max(shared.output.logprobs, shared.output.prompt_logprobs)
            shared.output.return_prompt_token_ids = True
    # Each prompt's request has a copy of what they share, so a body may grow to thousands of times its size.
    if (size := shared.ByteSize()) * len(body.prompt) > _MAX_COPIED_BYTES:
        raise InvalidRequestError(
            f"{len(body.prompt)} prompts with {size} bytes of parameters each are too much; send fewer prompts, or "
            "shorter lists, schemas and texts beside them",
            field="prompt",
        )
    requests = []
    for index, prompt in enumerate(body.prompt):
        request = pb.GenerateRequest()
        request.CopyFrom(shared)
        request.request_id = request_id if len(body.prompt) == 1 else f"{request_id}-{index}"
        if isinstance(prompt, str):
            request.text = prompt
        else:
            # An empty list must still be the prompt that was chosen.
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(_token_ids("prompt", prompt))
        requests.append(request)
    return requests


def chat_request(body: ChatCompletionBody, request_id: str) -> pb.GenerateRequest:
    """The request of a chat completion. Raises as `completion_requests` does."""
    check_no_legacy(body.functions, body.function_call)
    body.check_offered()
    request = _shared_request(body)
    request.request_id = request_id
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None:
        request.stop.max_tokens = _integer(name, max_tokens, 1 if body.prompt_logprobs is None else 0)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "prompt_logprobs do not come in a stream of a chat; set stream to false", field="prompt_logprobs"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs is given without logprobs; set logprobs to true", field="top_logprobs")
    if body.logprobs:
        request.output.logprobs = _integer("top_logprobs", body.top_logprobs, 0, default=0)
    request.chat.CopyFrom(
        _chat_prompt(body.messages, body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs)
    )
    request.chat.chat_template = body.chat_template or ""
    add_choice(request.chat, body)
    return request


def tokenize_request(body: TokenizeBody) -> pb.TokenizeRequest:
    """The request for token ids. Raises InvalidRequestError unless exactly one of prompt and messages is given."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", field="prompt")
    request = pb.TokenizeRequest(model=body.model or "")
    if body.prompt is not None:
        request.text = body.prompt
        if body.add_special_tokens is not None:
            request.add_special_tokens = body.add_special_tokens
        return request
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is for a prompt; the chat template adds its own", field="add_special_tokens"
        )
    request.chat.CopyFrom(
        _chat_prompt(
            body.messages or [], body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
        )
    )
    request.chat.chat_template = body.chat_template or ""
    add_tools(request.chat, body.tools)
    return request


def detokenize_request(body: DetokenizeBody) -> pb.DetokenizeRequest:
    """The request for text. Raises InvalidRequestError for numbers that cannot be token ids."""
    return pb.DetokenizeRequest(model=body.model or "", token_ids=_token_ids("tokens", body.tokens))


def param_of(field: str) -> str:
    """The name in OpenAI's API of a field of the contract: "sampling.top_p" is top_p, "chat.messages[0].role" is
    messages[0].role. Names that are OpenAI's already stay.
    """
    message, _, rest = field.partition(".")
    name = rest if rest and message in ("sampling", "stop", "output", "chat") else field
    return _PARAMS.get(name) or tool_param_of(name)


def _shared_request(body: CompletionBody | ChatCompletionBody) -> pb.GenerateRequest:
    """All that both kinds of completions have: sampling, stopping and the small things."""
    request = pb.GenerateRequest(model=body.model or "", cache_salt=body.cache_salt or "", tenant=body.user or "")
    if body.priority is not None:
        request.priority = _integer("priority", body.priority, -_INT32_MAX - 1, _INT32_MAX)
    _set_sampling(request, body)
    stop = request.stop
    stop.min_tokens = _integer("min_tokens", body.min_tokens, 0, default=0)
    stop.stop.extend(body.stop or ())
    stop.stop_token_ids.extend(_token_ids("stop_token_ids", body.stop_token_ids or ()))
    stop.ignore_eos = bool(body.ignore_eos)
    stop.include_stop_in_text = bool(body.include_stop_str_in_output)
    output = request.output
    if body.skip_special_tokens is not None:
        output.skip_special_tokens = body.skip_special_tokens
    output.spaces_between_special_tokens = bool(body.spaces_between_special_tokens)
    output.final_only = not body.stream
    if body.prompt_logprobs is not None:
        output.prompt_logprobs = _integer("prompt_logprobs", body.prompt_logprobs, 0)
    if body.stream_options is not None:
        if not body.stream:
            raise InvalidRequestError(
                "stream_options is given without stream; set stream to true", field="stream_options"
            )
        body.stream_options.check_offered("stream_options.")
    return request


def _set_sampling(request: pb.GenerateRequest, body: CompletionBody | ChatCompletionBody) -> None:
    sampling = request.sampling
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (value := getattr(body, name)) is not None:
            setattr(sampling, name, value)
    _set_rules(sampling, body)
    if body.top_k is not None:
        # Beyond any vocabulary, more is the same; and what is refused below stays refused.
        sampling.top_k = max(min(body.top_k, _INT32_MAX), -_INT32_MAX)
    if body.n is not None:
        sampling.n = _integer("n", body.n, 1)
    if body.use_beam_search:
        _set_beam_search(sampling, body)
    else:
        _set_best_of(sampling, body)
    if body.seed is not None:
        # Negative seeds are common; modulo 2^64 they are seeds like any other.
        sampling.seed = _integer("seed", body.seed, -(2**63), 2**64 - 1) % 2**64


def _set_rules(sampling: sampling_pb2.SamplingParams, body: CompletionBody | ChatCompletionBody) -> None:
    """Which tokens are favoured or forbidden."""
    for key, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[_bias_token_id(key)] = bias
    if body.allowed_token_ids is not None:
        if not body.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty, which forbids every token; leave it out to allow all",
                field="allowed_token_ids",
            )
        sampling.allowed_token_ids.extend(_token_ids("allowed_token_ids", body.allowed_token_ids))
    if body.bad_words:
        sampling.bad_words.extend(body.bad_words)
    if (grammar := grammar_of(body)) is not None:
        sampling.grammar.CopyFrom(grammar)


def _bias_token_id(key: str) -> int:
    """A key of logit_bias: JSON has only text there."""
    if key.isascii() and key.isdecimal() and len(key) <= len(str(_UINT32_MAX)):
        token_id = int(key)
        if str(token_id) == key and token_id <= _UINT32_MAX:
            return token_id
    raise InvalidRequestError(
        f'logit_bias has the key {shown(key)}; keys are token ids as text, such as "198"', field="logit_bias"
    )


def _set_best_of(sampling: sampling_pb2.SamplingParams, body: CompletionBody | ChatCompletionBody) -> None:
    for name, neutral in (("beam_width", None), ("length_penalty", 1), ("early_stopping", False)):
        if (value := getattr(body, name)) is not None and value != neutral:
            raise InvalidRequestError(
                f"{name} is given without use_beam_search; set use_beam_search to true", field=name
            )
    if body.best_of is None:
        return
    sampling.best_of = _integer("best_of", body.best_of, 1)
    if body.stream and body.best_of > (body.n or 1):
        raise InvalidRequestError(
            f"best_of is {body.best_of} and n is {body.n or 1}: which samples are the best is known only when all have "
            "ended, so they cannot be streamed; set stream to false",
            field="best_of",
        )


def _set_beam_search(sampling: sampling_pb2.SamplingParams, body: CompletionBody | ChatCompletionBody) -> None:
    """Beam search as vLLM's bodies ask for it: its width is beam_width, else best_of, else n."""
    name = "beam_width" if body.beam_width is not None else "best_of" if body.best_of is not None else "n"
    width = _integer(name, getattr(body, name), 1, default=1)
    if name == "beam_width" and body.best_of not in (None, width):
        raise InvalidRequestError(
            f"beam_width is {width} and best_of is {body.best_of}; with use_beam_search give one of them",
            field="best_of",
        )
    sampling.beam_search.beam_width = width
    if body.length_penalty is not None:
        sampling.beam_search.length_penalty = body.length_penalty
    if body.early_stopping is not None:
        sampling.beam_search.early_stopping = _EARLY_STOPPING[body.early_stopping]


def _chat_prompt(
    messages: Sequence[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: dict[str, object] | None,
) -> pb.ChatPrompt:
    prompt = pb.ChatPrompt(
        messages=[_message(index, message) for index, message in enumerate(messages)],
        continue_final_message=bool(continue_final_message),
    )
    if add_generation_prompt is not None:
        prompt.add_generation_prompt = add_generation_prompt
    if variables:
        try:
            json_format.ParseDict(variables, prompt.template_variables)
        except (json_format.ParseError, ValueError, OverflowError) as error:
            raise InvalidRequestError(
                f"chat_template_kwargs cannot be read: {error}", field="chat_template_kwargs"
            ) from None
    return prompt


def _message(index: int, message: Message) -> pb.ChatMessage:
    message.check_offered(f"messages[{index}].")
    result = pb.ChatMessage(role=message.role, name=message.name or "", tool_call_id=message.tool_call_id or "")
    if isinstance(message.content, str):
        result.content = message.content
    else:
        result.content_parts.extend(pb.ContentPart(text=text) for text in message.content or ())
    for call in message.tool_calls or ():
        result.tool_calls.add(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
    return result


def _integer(name: str, value: int | None, low: int, high: int = _UINT32_MAX, *, default: int | None = None) -> int:
    """value, or default where it is None. Raises InvalidRequestError for what the contract's type cannot hold."""
    if value is None:
        assert default is not None
        return default
    if not low <= value <= high:
        allowed = f"at least {low}" if value < low and high == _UINT32_MAX else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} is {value}; it must be {allowed}", field=name)
    return value


def _token_ids(name: str, token_ids: Iterable[int]) -> Iterable[int]:
    for token_id in token_ids:
        if not 0 <= token_id <= _UINT32_MAX:
            raise InvalidRequestError(
                f"{name} holds {token_id}; token ids are from 0 to the vocabulary's size - 1", field=name
            )
    return token_ids
