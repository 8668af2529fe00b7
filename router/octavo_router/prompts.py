"""Turns the prompt of a request into token ids, in threads, so that the event loop never waits for it.

A prompt that must be over the limit is refused before it is tokenized, by a lower bound that is cheap to compute. How
text becomes tokens is `tokenizer.py`'s, how messages become text `chat_template.py`'s.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf import json_format

from octavo.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from octavo.v1 import inference_pb2 as pb
from octavo_router import token_rules, tool_definitions, validation

if TYPE_CHECKING:
    from octavo_router.chat_template import ChatTemplate
    from octavo_router.served_model import ServedModel
    from octavo_router.template_process import TemplateProcesses
    from octavo_router.tokenizer import Tokenizer

T = TypeVar("T")

MAX_DECODED_TOKENS = 1 << 20
# So many times the model's context is tokenized at once: enough to see by how much a text is too long.
MAX_TOKENIZED_CONTEXTS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. text is what was tokenized; None where the caller gave token ids."""

    token_ids: Sequence[int]
    text: str | None = None


class PromptReader:
    """Reads the prompts of requests. Owns the threads that tokenize, render and decode."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        *,
        num_threads: int,
        request_templates: TemplateProcesses | None = None,
    ) -> None:
        """request_templates: renders templates that requests bring; None refuses those."""
        self._tokenizer = tokenizer
        self._request_templates = request_templates
        self._chat_template = chat_template
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    @property
    def has_chat_template(self) -> bool:
        """Whether chat prompts can be read."""
        return bool(self._chat_template.source)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a sequence."""
        return self._tokenizer.eos_token_ids

    async def read(self, request: pb.GenerateRequest, model: ServedModel) -> Prompt:
        """The request's prompt. Raises InvalidRequestError for one that is missing, empty or malformed, and
        ContextLengthError for one that leaves no room in the model's context.
        """
        kind = request.WhichOneof("prompt")
        is_prompt_only = validation.is_prompt_only(request)
        if kind == "token_ids":
            return _given_ids(request.token_ids.ids, model, is_prompt_only)
        if kind == "text":
            return await self._in_thread(lambda: self._encode(request.text, True, model, is_prompt_only))
        if kind == "chat":
            return await self._in_thread(lambda: self._encode(self._render(request.chat), False, model, is_prompt_only))
        raise InvalidRequestError("the request has no prompt; set text, token_ids or chat", field="prompt")

    async def tokenize(self, request: pb.TokenizeRequest, model: ServedModel) -> Sequence[int]:
        """Token ids of text or of rendered messages. Raises InvalidRequestError where neither is given, and
        ContextLengthError for text that is more than MAX_TOKENIZED_CONTEXTS times the model's context.
        """
        kind = request.WhichOneof("input")
        if kind == "text":
            add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return await self._in_thread(lambda: self._encode_any(request.text, add_special, model))
        if kind == "chat":
            return await self._in_thread(lambda: self._encode_any(self._render(request.chat), False, model))
        raise InvalidRequestError("the request has no input; set text or chat", field="input")

    async def decode(self, token_ids: Sequence[int], model: ServedModel, *, skip_special_tokens: bool) -> str:
        """Text of token ids. Raises InvalidRequestError for an id outside the model's vocabulary, or for more than
        MAX_DECODED_TOKENS of them.
        """
        if len(token_ids) > MAX_DECODED_TOKENS:
            raise InvalidRequestError(
                f"token_ids has {len(token_ids)} ids; at most {MAX_DECODED_TOKENS} are decoded at once",
                field="token_ids",
            )

        def work() -> str:
            validation.check_token_ids("token_ids", token_ids, model.vocab_size)
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

        return await self._in_thread(work)

    async def bad_word_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that spell checked bad words. Raises InvalidRequestError for one without tokens."""
        return await self._in_thread(lambda: token_rules.bad_word_token_ids(words, self._tokenizer))

    def close(self) -> None:
        """Ends the threads once what they do now is done. What waits for them is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._request_templates is not None:
            self._request_templates.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, add_special_tokens: bool, model: ServedModel, is_prompt_only: bool) -> Prompt:
        validation.check_prompt_length(
            self._tokenizer.min_token_count(text), model.max_model_len, at_least=True, is_prompt_only=is_prompt_only
        )
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; it must have at least one token", field="text")
        return Prompt(token_ids, text)

    def _encode_any(self, text: str, add_special_tokens: bool, model: ServedModel) -> Sequence[int]:
        limit, at_least = MAX_TOKENIZED_CONTEXTS * model.max_model_len, self._tokenizer.min_token_count(text)
        if at_least > limit:
            raise ContextLengthError(
                f"the text has at least {at_least} tokens; at most {limit}, {MAX_TOKENIZED_CONTEXTS} times the model's "
                "context, are tokenized at once: send it in parts",
                field="text",
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _render(self, chat: pb.ChatPrompt) -> str:
        messages, add_generation_prompt = checked_chat(chat)
        _check_writes_calls(chat, chat.chat_template or self._chat_template.source)
        return self._renderer(chat)(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tools=tool_definitions.templates_tools(chat),
            variables=_template_variables(chat),
        )

    def _renderer(self, chat: pb.ChatPrompt) -> Callable[..., str]:
        """What renders a conversation: the model's template, or the request's own where those are taken."""
        if not chat.chat_template:
            return self._chat_template.render
        if self._request_templates is None:
            raise UnsupportedError(
                "chat_template is not offered in a request here; start the router with --trust-request-chat-template, "
                "or with one template for all, --chat-template PATH",
                field="chat.chat_template",
            )
        return functools.partial(self._request_templates.render, chat.chat_template)


def _given_ids(token_ids: Sequence[int], model: ServedModel, is_prompt_only: bool) -> Prompt:
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; give at least one token id", field="token_ids")
    validation.check_prompt_length(len(token_ids), model.max_model_len, is_prompt_only=is_prompt_only)
    validation.check_token_ids("token_ids", token_ids, model.vocab_size)
    return Prompt(list(token_ids))


def checked_chat(chat: pb.ChatPrompt) -> tuple[list[dict[str, Any]], bool]:
    """The messages as templates take them, and whether the template opens the assistant's turn.

    Raises InvalidRequestError for a conversation that contradicts the contract.
    """
    if not chat.messages:
        raise InvalidRequestError("messages is empty; give at least one message", field="chat.messages")
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    if opens and chat.continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them to false",
            field="chat.continue_final_message",
        )
    return [_template_message(index, message) for index, message in enumerate(chat.messages)], opens


def _check_writes_calls(chat: pb.ChatPrompt, template: str) -> None:
    """Raises InvalidRequestError for calls in a conversation that the template would leave out without a word."""
    if not template or "tool_calls" in template:
        return
    for index, message in enumerate(chat.messages):
        if message.tool_calls:
            raise InvalidRequestError(
                f"messages[{index}] has tool_calls, which this model's chat template does not write; leave them out, "
                "or start the server with a template that does, such as --chat-template hermes",
                field=f"chat.messages[{index}].tool_calls",
            )


def _template_variables(chat: pb.ChatPrompt) -> dict[str, Any] | None:
    if not chat.HasField("template_variables"):
        return None
    try:
        variables: dict[str, Any] = json_format.MessageToDict(chat.template_variables)
    except ValueError:
        raise InvalidRequestError(
            "template_variables holds a number that is not finite; JSON has none", field="chat.template_variables"
        ) from None
    return {name: _with_integers(value) for name, value in variables.items()}


def _with_integers(value: Any) -> Any:
    """A JSON value whose whole numbers are integers: a Struct has floats only, and templates print 5.0 as it is."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _template_message(index: int, message: pb.ChatMessage) -> dict[str, Any]:
    field = f"chat.messages[{index}]"
    if not message.role:
        raise InvalidRequestError(f"messages[{index}] has no role; give one, such as user", field=f"{field}.role")
    if message.content and message.content_parts:
        raise InvalidRequestError(
            f"messages[{index}] has content and content_parts; they exclude each other", field=f"{field}.content_parts"
        )
    for part in message.content_parts:
        if part.WhichOneof("part") is None:
            raise InvalidRequestError(
                f"messages[{index}] has a part without content; set text", field=f"{field}.content_parts"
            )
    content = "".join(part.text for part in message.content_parts) if message.content_parts else message.content
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        result["name"] = message.name
    if message.tool_calls:
        result["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    return result
