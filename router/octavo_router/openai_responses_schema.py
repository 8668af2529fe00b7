"""The body of POST /v1/responses as this server takes it.

The server keeps no responses, so what refers to kept ones is refused by name. Items of the conversation are flat
models: which of their fields go together is checked where they become messages, in `openai_responses.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from octavo_router.openai_body import Body, Neutrals, OfferedBody, checked_texts, shown
from octavo_router.openai_schema import Ids, StopStrings

LOGPROBS = "message.output_text.logprobs"
# What `include` may hold: log-probabilities, and what there never is any of.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
ROLES = ("user", "assistant", "system", "developer")
_ITEM_TYPES = ("message", "function_call", "function_call_output")
# Types of parts, and which field of each holds its text.
_PART_TYPES = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# Fields of parts that answers have and that come back in the next request's input; they hold no text.
_PART_FIELDS = {"type", "text", "annotations", "logprobs", "refusal"}
_TOOL_CHOICES = ("none", "auto", "required")


def _checked_content(value: Any) -> Any:
    """The content of an item: text, or a list of the texts of its parts."""
    return checked_texts(value, _PART_TYPES, _PART_FIELDS)


def _checked_input(value: Any) -> Any:
    """The input as a list of items; text is a user's message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise ValueError("it must be a string or a list of items")


def _checked_tool_choice(value: Any) -> Any:
    """none, auto, required, or the name of a function as {"type": "function", "name": "..."}."""
    if value is None or (isinstance(value, str) and value in _TOOL_CHOICES):
        return value
    is_named = isinstance(value, dict) and value.keys() == {"type", "name"} and value["type"] == "function"
    if is_named and isinstance(value["name"], str):
        return value
    raise ValueError('it must be "none", "auto", "required" or {"type": "function", "name": "..."}')


_PART_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": {"type": "string"}},
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
            "required": ["type", "refusal"],
        },
    ]
}
_INCLUDE_SCHEMA = {"anyOf": [{"type": "array", "items": {"enum": list(INCLUDABLE)}}, {"type": "null"}]}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]}
_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": list(_TOOL_CHOICES)},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
        {"type": "null"},
    ]
}

ItemContent = Annotated[Any, BeforeValidator(_checked_content), WithJsonSchema(_CONTENT_SCHEMA)]
ToolChoice = Annotated[Any, BeforeValidator(_checked_tool_choice), WithJsonSchema(_TOOL_CHOICE_SCHEMA)]


class InputItem(Body):
    """A message, a function call that the model made, or a function's output. The last two say so in `type`."""

    type: Literal["message", "function_call", "function_call_output"] | None = None
    role: str | None = None
    content: ItemContent = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: ItemContent = None
    # What answers say of their items, for those who send them back as they came. Without effect.
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind is not None and kind not in _ITEM_TYPES:
            raise ValueError(
                f"items of type {shown(kind)} are not offered by this server, which has text and functions"
            )
        return value


class TextFormat(Body):
    """What the text must look like: anything, a JSON object, or JSON that a schema accepts."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(OfferedBody):
    """How text is written."""

    not_offered: ClassVar[Neutrals] = {"verbosity": ("medium",)}

    format: TextFormat | None = None
    verbosity: Any = None


class FunctionTool(Body):
    """A function that the model may call. Other kinds of tools are not offered."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind is not None and kind != "function":
            raise ValueError(f"tools of type {shown(kind)} are not offered by this server; only functions are")
        return value


class ReasoningConfig(OfferedBody):
    """How a model reasons; no model here is told how."""

    not_offered: ClassVar[Neutrals] = {"effort": ("none",), "generate_summary": (), "summary": ()}

    effort: Any = None
    generate_summary: Any = None
    summary: Any = None


class ResponseStreamOptions(OfferedBody):
    """How a stream reports."""

    not_offered: ClassVar[Neutrals] = {"include_obfuscation": (False,)}

    include_obfuscation: Any = None


class ResponsesBody(OfferedBody):
    """POST /v1/responses. Fields without effect here: hints to OpenAI's own service (safety_identifier,
    prompt_cache_key, prompt_cache_retention, service_tier)."""

    not_offered: ClassVar[Neutrals] = {
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": ({},),
        "store": (False,),
        "truncation": ("disabled",),
    }

    input: Annotated[
        list[InputItem],
        Field(fail_fast=True),
        BeforeValidator(_checked_input, json_schema_input_type=str | list[InputItem]),
    ]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str] | None, WithJsonSchema(_INCLUDE_SCHEMA)] = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None

    # vLLM's additions, as chat completions have them.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: StopStrings = None
    stop_token_ids: Ids | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    store: Any = None
    truncation: Any = None
