"""The bodies of OpenAI's API as this server takes them, with vLLM's additions.

A field that the API knows but this server does not offer is declared, so that the error says so; any other field is
unknown. How bodies are read is `openai_body.py`'s. Ranges are not checked here: `validation.py` does that for every
front end. What becomes of a body is `openai_requests.py`'s.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from octavo_router.openai_body import Body as _Body
from octavo_router.openai_body import Neutrals, checked_texts
from octavo_router.openai_body import OfferedBody as _OfferedBody
from octavo_router.openai_body import parse_body as parse_body
from octavo_router.openai_grammar import ResponseFormat, Schema, StructuredOutputs
from octavo_router.openai_tools import Choice as ToolChoice
from octavo_router.openai_tools import Tools

# Values that ask for nothing, so that a field which is not offered may have them: by name, beside null.
_SHARED_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}
_COMPLETION_NOT_OFFERED: dict[str, tuple[Any, ...]] = _SHARED_NOT_OFFERED | {
    "prompt_embeds": (),
    "suffix": ("",),
}
_CHAT_NOT_OFFERED: dict[str, tuple[Any, ...]] = _SHARED_NOT_OFFERED | {
    "audio": (),
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
    return checked_texts(value, {"text": "text"}, {"type", "text"})


_TEXTS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
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

Ids = Annotated[list[int], Field(fail_fast=True), WithJsonSchema(_IDS_SCHEMA)]
Texts = Annotated[list[str], Field(fail_fast=True)]
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

    not_offered: ClassVar[Neutrals] = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


class _GenerationBody(_OfferedBody):
    """What completions and chat completions have in common. Fields without effect here: metadata, hints to
    OpenAI's own service (safety_identifier, prompt_cache_key, prompt_cache_retention, service_tier) and to an older
    vLLM (guided_decoding_backend)."""

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
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    stop: StopStrings = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
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
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    repetition_detection: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    structural_tag: Any = None
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

    role: Annotated[str, Field(json_schema_extra={"minLength": 1})]
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
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionBody(_GenerationBody, _Conversation):
    """POST /v1/chat/completions."""

    not_offered = _CHAT_NOT_OFFERED

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    audio: Any = None
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
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeBody(_OfferedBody):
    """POST /tokenize, as vLLM has it: a prompt or messages."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None


class DetokenizeBody(_Body):
    """POST /detokenize, as vLLM has it."""

    model: str | None = None
    tokens: Ids
