"""Renders conversations with a model's Jinja chat template, in a sandbox, as transformers does.

A template is the model author's program. Whatever it does wrong or refuses (raise_exception, an undefined method, a
syntax error) is an InvalidRequestError with its own message. The sandbox keeps it from Python's internals; the loops it
runs, the sequences it multiplies and the text it writes are bounded, so that a mistake in it does not take the process
along. It is not a jail for hostile code: templates are the operator's choice, never a client's.

Which template a model has, how messages arrive and what its special tokens are is left to the callers. The rendered
text holds the special tokens that the template writes: tokenize it with `ChatTemplate.add_special_tokens`. The
environment follows transformers' `render_jinja_template` (transformers/utils/chat_template_utils.py, version 5).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro

from octavo.errors import InvalidRequestError

MAX_STEPS = 1_000_000
"""Most loop iterations in one rendering; a call counts for `_CALL_STEPS` of them."""

MAX_LENGTH = 64 << 20
"""Most characters of a rendered prompt, and most items of what an operator in a template makes."""

_CALL_STEPS = 10
_MAX_POWER = 1 << 16
_RESERVED = ("messages", "tools", "add_generation_prompt")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled chat template. Immutable; many threads may render with one."""

    add_special_tokens: Final = False
    """How a rendered prompt is tokenized: its template has written the special tokens, the beginning of sequence among
    them, so `Tokenizer.encode(prompt, add_special_tokens=False)` keeps it from being there twice."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """source: Jinja; empty for a model without a template, for which every rendering is refused with the remedy.

        special_tokens: name, such as "bos_token", to text; variables of the template. now: the clock of strftime_now.
        Raises InvalidRequestError for a template that is not Jinja.
        """
        self.source: Final = source
        self._special_tokens = dict(special_tokens)
        self._environment = _Environment(now)
        self._template: jinja2.Template | None = None
        self._takes_parts = False
        self.takes_tools = False
        """Whether the template does anything with tools."""
        if not source:
            return
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
            self._takes_parts = _takes_parts_only(tree)
            self.takes_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        except jinja2.TemplateSyntaxError as error:
            raise _refusal(f"is not Jinja: {error.message}, line {error.lineno}") from None
        except (RecursionError, OverflowError) as error:
            raise _refusal(f"cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        messages: each with "role", and what else the template reads; "content" may be a list of {"type": "text",
        "text": ...}, which are joined. Keys that are None count as absent. Arguments of tool calls may be JSON text.
        continue_final_message: the prompt ends with the last message's content, so that generation goes on from it.
        tools: JSON schemas of functions. variables: more variables of the template; they win over special tokens.

        Raises InvalidRequestError for what the template refuses or cannot render.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template, so it takes prompts as text or token ids only; "
                "to chat, start the server with --chat-template FILE",
                field="chat",
            )
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one message", field="chat.messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                field="chat.continue_final_message",
            )
        for name in _RESERVED:
            if name in (variables or {}):
                raise InvalidRequestError(
                    f"template variable {name!r} is set by the server; give it another name",
                    field="chat.template_variables",
                )
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        final = _tag_final_message(plain) if continue_final_message else None
        if self._takes_parts:
            for message in plain:
                if isinstance(message.get("content"), str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        given = {
            **self._special_tokens,
            "documents": None,
            **(variables or {}),
            "messages": plain,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(self._template, given)
        return text if final is None else _cut_at_tag(text, final)

    def _run(self, template: jinja2.Template, given: Mapping[str, Any]) -> str:
        self._environment.meter.steps = 0
        parts: list[str] = []
        length = 0
        try:
            for part in template.generate(given):
                parts.append(part)
                length += len(part)
                if length > MAX_LENGTH:
                    raise _refusal(f"wrote more than {MAX_LENGTH} characters")
        except jinja2.TemplateError as error:
            raise _refusal(f"refused the messages: {error.message or type(error).__name__}") from None
        except RecursionError:
            raise _refusal("calls itself too deeply") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template is a program: an operation that its values do not have is its refusal, not a fault of ours.
            raise _refusal(f"failed on the messages: {error}") from None
        return "".join(parts)


class _Meter(threading.local):
    """Steps of the rendering that runs in this thread."""

    steps = 0

    def charge(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise jinja2.TemplateRuntimeError(f"it takes more than {MAX_STEPS} steps")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with a meter on loops, calls and operators."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols], cache_size=0
        )
        self.meter = _Meter()
        self.filters["tojson"] = _tojson
        self.filters[_METERED] = self._metered
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda format: now().strftime(format),
            dict=_DictFactory(),
            namespace=_Namespace,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _METERED, [], [], None, None, lineno=loop.lineno, environment=self)
        return tree

    def _metered(self, items: Iterable[Any]) -> Iterable[Any]:
        """What a loop runs over, paid for in advance where its length is known."""
        if isinstance(items, Sized):
            self.meter.charge(len(items))
            return items
        return self._counted(iter(items))

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.meter.charge(1)
            yield item

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.meter.charge(_CALL_STEPS)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses operations whose result would be huge, before they are done."""
        length = 0
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            length = len(left) + len(right)
        elif operator == "*" and isinstance(left, Sized) != isinstance(right, Sized):
            items, times = (left, right) if isinstance(left, Sized) else (right, left)
            length = len(items) * times if isinstance(times, int) else 0
        elif operator == "**" and any(isinstance(side, int) and abs(side) > _MAX_POWER for side in (left, right)):
            raise jinja2.TemplateRuntimeError(f"numbers over {_MAX_POWER} are not raised to a power")
        if length > MAX_LENGTH:
            raise jinja2.TemplateRuntimeError(f"{operator} would make more than {MAX_LENGTH} items")
        return super().call_binop(context, operator, left, right)


_METERED = "octavo_metered"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _DictFactory:
    """`dict` for templates, without the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is, without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _takes_parts_only(tree: nodes.Template) -> bool:
    """Whether a template takes the content of a message as a list of parts alone: it loops over it without asking
    whether it is a string. Templates that ask take both, and all others take strings."""
    if any(test.name == "string" for test in tree.find_all(nodes.Test)):
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return (isinstance(node, nodes.Getattr) and node.attr == "content") or (
        isinstance(node, nodes.Name) and node.name == "content"
    )


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it: parts joined, arguments as objects, absent keys absent. The given one stays."""
    field = f"chat.messages[{index}]"
    plain = {key: value for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise InvalidRequestError(f"messages[{index}] has no role; give one, such as user", field=f"{field}.role")
    content = plain.get("content")
    if content is not None and not isinstance(content, str):
        plain["content"] = _joined(index, content)
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            _plain_tool_call(f"messages[{index}].tool_calls[{number}]", call)
            for number, call in enumerate(plain["tool_calls"])
        ]
    return plain


def _joined(index: int, parts: Sequence[Mapping[str, Any]]) -> str:
    texts: list[str] = []
    for number, part in enumerate(parts):
        text = part.get("text")
        if part.get("type", "text") != "text" or not isinstance(text, str):
            raise InvalidRequestError(
                f"messages[{index}].content[{number}] is of type {part.get('type')!r}; only text parts are taken",
                field=f"chat.messages[{index}].content[{number}]",
            )
        texts.append(text)
    return "".join(texts)


def _plain_tool_call(name: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, which is what templates write out. OpenAI sends them as JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
        # Escapes may spell halves of characters, which no prompt can hold.
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(
            f"{name}.function.arguments is {text[:60]!r}{'...' if len(text) > 60 else ''}; it must be a JSON object",
            field=f"chat.{name}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _tag_final_message(messages: list[dict[str, Any]]) -> str:
    """Puts a tag behind the last message's content, to find its end in the prompt. Returns the content."""
    content = messages[-1].get("content")
    if content is None:
        raise InvalidRequestError(
            "continue_final_message is set, but the last message has no content to continue",
            field="chat.continue_final_message",
        )
    messages[-1]["content"] = content + _CONTINUE_TAG
    return str(content)


def _cut_at_tag(text: str, final: str) -> str:
    """The prompt up to the end of the last message's content."""
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template changes or leaves out the last message's content",
            field="chat.continue_final_message",
        )
    end = text.rindex(tag)
    if text.startswith(_CONTINUE_TAG, end):
        return text[:end]
    # The template trims contents, so the space before the tag would have been trimmed too.
    return text[:end].rstrip()


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the chat template {what}", field="chat")
