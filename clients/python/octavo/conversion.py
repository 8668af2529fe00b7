"""Between the types people hold and the messages of `octavo.v1`: requests out, responses back.

Shared by the synchronous and the asynchronous client. Values are not judged here: what the contract can express goes
to the server, which answers for it. Only what cannot be put into a message (a negative count, an unknown key) is
refused here, with the error the server would have used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseError
from google.protobuf.message import Message as ProtoMessage

from octavo.errors import InvalidRequestError
from octavo.types import (
    ChatOptions,
    Message,
    Prompt,
    RequestOptions,
    SamplingParams,
    StructuredOutputsParams,
)
from octavo.v1 import inference_pb2, sampling_pb2

_EXPECTED = {
    FieldDescriptor.TYPE_UINT32: "an integer from 0 to 4294967295",
    FieldDescriptor.TYPE_UINT64: "an integer from 0 to 18446744073709551615",
    FieldDescriptor.TYPE_INT32: "an integer from -2147483648 to 2147483647",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_STRING: "a text",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_MESSAGE: "a value that JSON can express",
}

_EARLY_STOPPING = {
    False: sampling_pb2.BEAM_EARLY_STOPPING_FALSE,
    True: sampling_pb2.BEAM_EARLY_STOPPING_TRUE,
    "never": sampling_pb2.BEAM_EARLY_STOPPING_NEVER,
}

_TOOL_CHOICES = {
    "none": inference_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": inference_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
}

_Options = TypeVar("_Options", bound=RequestOptions)

_REQUEST_OPTIONS = frozenset(get_type_hints(RequestOptions))
_CHAT_OPTIONS = frozenset(get_type_hints(ChatOptions))
_MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


def _assign(message: ProtoMessage, field: str, value: Any, path: str = "") -> None:
    """Puts a value into a field of any kind. Raises InvalidRequestError, naming `path`, where the field cannot hold
    it.
    """
    path = f"{path}.{field}" if path else field
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    target = getattr(message, field)
    try:
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            target.update(value)
        elif hasattr(target, "extend"):
            if isinstance(value, str):
                raise TypeError
            target.extend(value)
        elif descriptor.message_type is not None:
            target.update(value)
        else:
            setattr(message, field, value)
    except (TypeError, ValueError, AttributeError, ParseError):
        kind = _EXPECTED.get(descriptor.type, "of another kind")
        expected = f"a list, each item {kind}" if hasattr(target, "extend") else kind
        raise InvalidRequestError(f"{path} is {_shown(value)}; it must be {expected}", field=path) from None


def _items(value: Any, path: str, expected: str) -> Iterable[Any]:
    """A list's items. Raises InvalidRequestError for what is no list."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{path} is {_shown(value)}; it must be {expected}", field=path)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_options(options: Mapping[str, Any], *, chat: bool = False) -> None:
    """Raises TypeError for a keyword that is no option of a request: a misspelt one must not be lost in silence."""
    known = _CHAT_OPTIONS if chat else _REQUEST_OPTIONS
    for name in options:
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}; a request takes {', '.join(sorted(known))}")


def _given(options: _Options) -> _Options:
    """The options that say something: None is the same as leaving one out."""
    return cast(_Options, {name: value for name, value in options.items() if value is not None})


def generate_request(
    prompt: Prompt, params: SamplingParams | None, options: RequestOptions, *, final_only: bool
) -> inference_pb2.GenerateRequest:
    """A request for text or token ids. `params` None leaves everything to the model's defaults.

    Raises InvalidRequestError for what the contract cannot express, TypeError for an unknown option.
    """
    check_options(options)
    request = _request(params, _given(options), final_only)
    match prompt:
        case str():
            _assign(request, "text", prompt)
        case {"prompt_token_ids": ids, **rest} if not rest or rest.keys() == {"prompt"}:
            _set_token_ids(request, ids)
        case {"prompt": text, **rest} if not rest:
            _assign(request, "text", text)
        case Mapping():
            keys = ", ".join(map(str, prompt)) or "none"
            raise InvalidRequestError(
                f"a prompt's dictionary has the key 'prompt' or 'prompt_token_ids'; this one has: {keys}",
                field="prompt",
            )
        case _:
            _set_token_ids(request, prompt)
    request.output.return_prompt_token_ids = request.WhichOneof("prompt") == "text"
    return request


def chat_request(
    messages: Sequence[Message], params: SamplingParams | None, options: ChatOptions, *, final_only: bool
) -> inference_pb2.GenerateRequest:
    """A request for the next turn of a conversation. Errors as in `generate_request`."""
    check_options(options, chat=True)
    options = _given(options)
    request = _request(params, options, final_only)
    request.chat.CopyFrom(chat_prompt(messages, options))
    request.output.return_prompt_token_ids = True
    return request


def tokenize_request(
    source: str | Sequence[Message],
    *,
    model: str,
    add_special_tokens: bool | None,
    chat_options: ChatOptions | None = None,
) -> inference_pb2.TokenizeRequest:
    """A request for the token ids of text or of a conversation, which chat_options say how to render."""
    request = inference_pb2.TokenizeRequest(model=model)
    if isinstance(source, str):
        _assign(request, "text", source)
    else:
        options: ChatOptions = chat_options or {}
        check_options(options, chat=True)
        request.chat.CopyFrom(chat_prompt(source, _given(options)))
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    return request


def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """A request for the text of token ids."""
    request = inference_pb2.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
    _assign(request, "token_ids", token_ids)
    return request


def chat_prompt(messages: Sequence[Message], options: ChatOptions) -> inference_pb2.ChatPrompt:
    """A conversation in OpenAI's form as the contract's message."""
    chat = inference_pb2.ChatPrompt()
    for index, message in enumerate(_items(messages, "messages", "a list of messages")):
        _add_message(chat.messages.add(), message, f"messages[{index}]")
    if "add_generation_prompt" in options:
        _assign(chat, "add_generation_prompt", options["add_generation_prompt"])
    if "continue_final_message" in options:
        _assign(chat, "continue_final_message", options["continue_final_message"])
    if "chat_template" in options:
        _assign(chat, "chat_template", options["chat_template"])
    if "chat_template_kwargs" in options:
        _assign(chat, "template_variables", options["chat_template_kwargs"])
    for index, tool in enumerate(_items(options.get("tools", ()), "tools", "a list of tools")):
        _add_tool(chat.tools.add(), tool, f"tools[{index}]")
    if (choice := options.get("tool_choice")) is not None:
        if isinstance(choice, str) and choice in _TOOL_CHOICES:
            chat.tool_choice.mode = _TOOL_CHOICES[choice]
        else:
            chat.tool_choice.mode = inference_pb2.TOOL_CHOICE_MODE_NAMED
            name = choice if isinstance(choice, str) else _function_of(choice, "tool_choice").get("name")
            _assign(chat.tool_choice, "name", name, "tool_choice")
    if "parallel_tool_calls" in options:
        _assign(chat, "parallel_tool_calls", options["parallel_tool_calls"])
    return chat


def _request(params: SamplingParams | None, options: RequestOptions, final_only: bool) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    for field in ("request_id", "model", "priority", "cache_salt", "adapter", "tenant"):
        if field in options:
            _assign(request, field, options[field])
    request.output.final_only = final_only
    if params is not None:
        _set_sampling(request.sampling, params)
        _set_stop(request.stop, params)
        _set_output(request.output, params)
    return request


def _set_token_ids(request: inference_pb2.GenerateRequest, ids: object) -> None:
    request.token_ids.SetInParent()
    _assign(request.token_ids, "ids", ids, "prompt_token_ids")


def _set_sampling(message: sampling_pb2.SamplingParams, params: SamplingParams) -> None:
    for field in ("temperature", "top_p", "top_k", "seed"):
        if (value := getattr(params, field)) is not None:
            _assign(message, field, value, "sampling")
    for field, neutral in (("n", 1), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if (value := getattr(params, field)) != neutral:
            _assign(message, field, value, "sampling")
    _assign(message, "presence_penalty", params.presence_penalty, "sampling")
    _assign(message, "frequency_penalty", params.frequency_penalty, "sampling")
    if params.logit_bias is not None:
        _assign(message, "logit_bias", _with_integer_keys(params.logit_bias), "sampling")
    for field in ("allowed_token_ids", "bad_words"):
        if (value := getattr(params, field)) is not None:
            _assign(message, field, value, "sampling")
    if params.allowed_token_ids is not None and not message.allowed_token_ids:
        raise InvalidRequestError(
            "allowed_token_ids is empty, which forbids every token; leave it out to allow all",
            field="sampling.allowed_token_ids",
        )
    if params.use_beam_search:
        _set_beam_search(message.beam_search, params)
    else:
        _check_no_beams(params)
        if params.best_of is not None:
            _assign(message, "best_of", params.best_of, "sampling")
    if params.structured_outputs is not None and params.guided_decoding is not None:
        raise InvalidRequestError(
            "structured_outputs and guided_decoding are given, two names of one thing; leave guided_decoding out",
            field="sampling.grammar",
        )
    if (outputs := params.structured_outputs or params.guided_decoding) is not None:
        _set_grammar(message.grammar, outputs)


def _with_integer_keys(biases: Any) -> Any:
    """Token ids that JSON made text are numbers again."""
    if not isinstance(biases, Mapping):
        return biases
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: bias for key, bias in biases.items()}


def _set_beam_search(message: sampling_pb2.BeamSearch, params: SamplingParams) -> None:
    width, path = params.beam_width, "sampling.beam_search"
    if width is None:
        width = params.n if params.best_of is None else params.best_of
    elif params.best_of not in (None, width):
        raise InvalidRequestError(
            f"beam_width is {width} and best_of is {params.best_of}; with use_beam_search give one of them",
            field="sampling.best_of",
        )
    _assign(message, "beam_width", width, path)
    _assign(message, "length_penalty", params.length_penalty, path)
    if params.early_stopping not in _EARLY_STOPPING:
        path = f"{path}.early_stopping"
        raise InvalidRequestError(f"{path} is {params.early_stopping!r}; it must be False, True or 'never'", field=path)
    message.early_stopping = _EARLY_STOPPING[params.early_stopping]


def _check_no_beams(params: SamplingParams) -> None:
    for field, neutral in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(params, field) != neutral:
            raise InvalidRequestError(
                f"{field} is given without use_beam_search; set use_beam_search to True",
                field=f"sampling.beam_search.{field}",
            )


def _set_grammar(message: sampling_pb2.Grammar, params: StructuredOutputsParams) -> None:
    path = "sampling.grammar"
    kinds = ("json", "regex", "choice", "grammar", "json_object")
    given = [name for name in kinds if getattr(params, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequestError(
            f"structured_outputs takes exactly one of json, regex, choice, grammar, json_object; given: "
            f"{', '.join(given) or 'none'}",
            field=path,
        )
    match given[0]:
        case "json":
            _assign(message, "json_schema", _json_text(params.json, f"{path}.json_schema"), path)
        case "regex":
            _assign(message, "regex", params.regex, path)
        case "choice":
            _assign(message.choices, "choices", params.choice, path)
        case "grammar":
            _assign(message, "lark", params.grammar, path)
        case "json_object":
            message.json_object = True


def _json_text(schema: Any, path: str) -> str:
    """A JSON schema as text, its keys in the order given. Text stays as it is."""
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(
            f"{path} is {_shown(schema)}; it must be a value that JSON can express", field=path
        ) from None


def _set_stop(message: sampling_pb2.StopConditions, params: SamplingParams) -> None:
    if params.max_tokens is not None:
        _assign(message, "max_tokens", params.max_tokens, "stop")
    _assign(message, "min_tokens", params.min_tokens, "stop")
    _assign(message, "stop", [params.stop] if isinstance(params.stop, str) else params.stop or (), "stop")
    _assign(message, "stop_token_ids", params.stop_token_ids or (), "stop")
    _assign(message, "ignore_eos", params.ignore_eos, "stop")
    _assign(message, "include_stop_in_text", params.include_stop_str_in_output, "stop")


def _set_output(message: sampling_pb2.OutputOptions, params: SamplingParams) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        if (value := getattr(params, field)) is not None:
            _assign(message, field, value, "output")
    if not params.skip_special_tokens:
        message.skip_special_tokens = False
    _assign(message, "spaces_between_special_tokens", params.spaces_between_special_tokens, "output")


def _add_message(target: inference_pb2.ChatMessage, message: Message, path: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{path} is {_shown(message)}; it must be a dictionary with 'role' and 'content'", field=path
        )
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise InvalidRequestError(f"{path} has the unknown key {key!r}", field=f"{path}.{key}")
    for key in ("role", "name", "tool_call_id"):
        if (value := message.get(key)) is not None:
            _assign(target, key, value, path)
    content = message.get("content")
    if isinstance(content, str):
        _assign(target, "content", content, path)
    elif content is not None:
        for index, part in enumerate(_items(content, f"{path}.content", "a text or a list of parts")):
            where = f"{path}.content[{index}]"
            if not isinstance(part, Mapping) or part.get("type") != "text" or part.keys() != {"type", "text"}:
                raise InvalidRequestError(
                    f"{where} is {_shown(part)}; a part is {{'type': 'text', 'text': ...}}", field=where
                )
            _assign(target.content_parts.add(), "text", part["text"], where)
    calls = _items(message.get("tool_calls") or (), f"{path}.tool_calls", "a list of calls")
    for index, call in enumerate(calls):
        where = f"{path}.tool_calls[{index}]"
        function = _function_of(call, where)
        added = target.tool_calls.add()
        _assign(added, "id", call.get("id", ""), where)
        _assign(added, "name", function.get("name", ""), where)
        _assign(added, "arguments_json", function.get("arguments", ""), where)


def _add_tool(target: inference_pb2.Tool, tool: Mapping[str, Any], path: str) -> None:
    function = _function_of(tool, path)
    for key in ("name", "description", "strict"):
        if (value := function.get(key)) is not None:
            _assign(target, key, value, path)
    if (parameters := function.get("parameters")) is not None:
        _assign(target, "parameters_json", _json_text(parameters, f"{path}.parameters"), path)


def _function_of(tool: Any, path: str) -> Mapping[str, Any]:
    """The inner part of {"type": "function", "function": {...}}."""
    if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
        return cast(Mapping[str, Any], tool["function"])
    raise InvalidRequestError(
        f"{path} is {_shown(tool)}; it must be {{'type': 'function', 'function': {{'name': ...}}}}", field=path
    )
