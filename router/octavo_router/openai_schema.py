"""The bodies of OpenAI's API as this server takes them, with vLLM's additions.

Types are strict: a number in quotes is not a number. `null` is the same as leaving a field out. A field that the API
knows but this server does not offer is declared, so that the error says so; any other field is unknown. Ranges are not
checked here: `validation.py` does that for every front end. What becomes of a body is `openai_requests.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from octavo.errors import InvalidRequestError, UnsupportedError

_SHOWN_LENGTH = 60
# Telling about an error takes some microseconds in which nothing else runs, and only the first is told.
_MAX_ERRORS = 100

# Values that ask for nothing, so that a field which is not offered may have them: by name, beside null.
_SHARED_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structural_tag": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}
_COMPLETION_NOT_OFFERED: dict[str, tuple[Any, ...]] = _SHARED_NOT_OFFERED | {
    "prompt_embeds": (),
    "suffix": ("",),
}
_CHAT_NOT_OFFERED: dict[str, tuple[Any, ...]] = _SHARED_NOT_OFFERED | {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_MESSAGE_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": ("",),
}


class _Body(BaseModel):
    """Base of all bodies: strict, closed, and without NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class _OfferedBody(_Body):
    """A body some of whose known fields are not offered."""

    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def check_offered(self, path: str = "") -> None:
        """Raises UnsupportedError that names the first field set to something this server does not offer."""
        for name in self.model_fields_set & self.not_offered.keys():
            value = getattr(self, name)
            if value is None or any(_same(value, neutral) for neutral in self.not_offered[name]):
                continue
            raise UnsupportedError(f"{path}{name} is not offered by this server; leave it out", field=f"{path}{name}")


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _checked_prompt(value: Any) -> Any:
    """A prompt as a list of prompts, each text or token ids. `[]` stays; what is wrong in it is refused."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return [value]
        if all(_is_ids(item) for item in value):
            return value
    raise ValueError("it must be a string, a list of strings, a list of token ids or a list of such lists")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _checked_stop(value: Any) -> Any:
    """Stop strings as a list."""
    if isinstance(value, str):
        return [value]
    if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("it must be a string or a list of strings")


def _checked_early_stopping(value: Any) -> Any:
    """When a beam search ends: true, false or "never"."""
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise ValueError('it must be true, false or "never"')


def _checked_content(value: Any) -> Any:
    """A message's content: text, or a list of the texts of its parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("it must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or "type" not in part:
            raise ValueError('each part must be an object with a type, such as {"type": "text", "text": "..."}')
        if part["type"] != "text":
            raise ValueError(f"part type {_shown(part['type'])} is not offered by this server; only text is")
        if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
            raise ValueError("a text part has the fields type and text, and text is a string")
        texts.append(part["text"])
    return texts


_TEXTS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA},
    ]
}
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]}

Ids = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[Any, BeforeValidator(_checked_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
StopStrings = Annotated[Any, BeforeValidator(_checked_stop), WithJsonSchema(_TEXTS_SCHEMA)]
EarlyStopping = Annotated[
    Any,
    BeforeValidator(_checked_early_stopping),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}]}),
]
Content = Annotated[Any, BeforeValidator(_checked_content), WithJsonSchema(_CONTENT_SCHEMA)]


class StreamOptions(_OfferedBody):
    """How a stream reports."""

    not_offered = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: Any = None
    include_obfuscation: Any = None


class _GenerationBody(_OfferedBody):
    """What completions and chat completions have in common. Fields without effect here: user, metadata and hints to
    OpenAI's own service (safety_identifier, prompt_cache_key, prompt_cache_retention, service_tier)."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: StopStrings = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None

    add_special_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    guided_choice: Any = None
    guided_decoding_backend: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    logit_bias: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    repetition_detection: Any = None
    response_format: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: Any = None
    vllm_xargs: Any = None


class CompletionBody(_GenerationBody):
    """POST /v1/completions."""

    not_offered = _COMPLETION_NOT_OFFERED

    prompt: Prompts = Field()
    echo: bool | None = None
    logprobs: int | None = None

    prompt_embeds: Any = None
    suffix: Any = None


class Function(_Body):
    """A called function: its name, and its arguments as JSON text."""

    name: str
    arguments: str = ""


class ToolCall(_Body):
    """A call that an assistant's message made."""

    function: Function
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class Message(_OfferedBody):
    """One turn of a conversation. content is text or the texts of its parts."""

    not_offered = _MESSAGE_NOT_OFFERED

    role: str
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None


Messages = Annotated[list[Message], Field(fail_fast=True)]


class _Conversation(_Body):
    """Messages and how the template renders them."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionBody(_GenerationBody, _Conversation):
    """POST /v1/chat/completions."""

    not_offered = _CHAT_NOT_OFFERED

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    store: Any = None
    thinking_token_budget: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeBody(_OfferedBody):
    """POST /tokenize, as vLLM has it: a prompt or messages."""

    not_offered = {"chat_template": (), "return_token_strs": (False,), "tools": ([],)}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Any = None
    return_token_strs: Any = None
    tools: Any = None


class DetokenizeBody(_Body):
    """POST /detokenize, as vLLM has it."""

    model: str | None = None
    tokens: Ids


B = TypeVar("B", bound=_Body)


def parse_body(body: type[B], data: bytes) -> B:
    """The body that JSON text holds. Raises InvalidRequestError that names the first wrong field and its value."""
    try:
        return body.model_validate_json(data)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidRequestError:
    if error.error_count() > _MAX_ERRORS:
        return InvalidRequestError(f"the body has {error.error_count()} fields that are wrong or unknown")
    first = error.errors(include_url=False)[0]
    path = _path(first["loc"])
    kind, message = first["type"], first["msg"]
    if not path:
        if kind == "json_invalid":
            reason = message.removeprefix("Invalid JSON: ")
            return InvalidRequestError(f"the body is not valid JSON in UTF-8: {reason}")
        return InvalidRequestError("the body must be a JSON object")
    if kind == "extra_forbidden":
        return InvalidRequestError(f"unknown field {path}; leave it out", field=path)
    if kind == "missing":
        return InvalidRequestError(f"{path} is missing; it is required", field=path)
    reason = message.removeprefix("Value error, ").replace("Input should be", "it must be", 1)
    return InvalidRequestError(f"{path} is {_shown(first['input'])}; {reason}", field=path)


def _path(location: tuple[int | str, ...]) -> str:
    """A field's path as people write it: messages[0].role."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
