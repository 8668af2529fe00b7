"""Tool calls between the contract and the engine: what a request with tools asks of it, and what its text says.

The text stays as the model wrote it, marks and all, so that a resume is exact; what it says goes beside it, as
ParsedDelta. How a family writes calls is `tool_parsers`' matter, the grammar that makes it call `tool_grammars.py`'s.

A caller's own grammar and tools exclude each other where a call is required. Otherwise the answer matches the grammar,
so that all of it is content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequestError, UnsupportedError
from octavo.v1 import inference_pb2 as pb
from octavo_router.tool_definitions import ToolChoice, ToolDefinition, choice_of, tools_of
from octavo_router.tool_grammars import call_grammar
from octavo_router.tool_parsers import PARSERS, Parsed, ToolParser, parser_of_template

if TYPE_CHECKING:
    from octavo_router.chat_template import ChatTemplate
    from octavo_router.tokenizer import Tokenizer

AUTO = "auto"
LONG_TEXT = 16 << 10
_MISTRAL_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What becomes of a request whose answer may call tools.

    family: of the parser, a name in PARSERS; shown_token_ids: special tokens that the text must have in it for the
    parser; lark: the grammar of required or strict calls, else empty; has_several: more than one call comes back;
    is_named: the caller named the tool, so that the call is no news and the sample ends as any other.
    """

    family: str
    tool_names: frozenset[str]
    shown_token_ids: frozenset[int] = frozenset()
    lark: str = ""
    has_several: bool = True
    is_named: bool = False

    def constrained(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """The request with the grammar of its calls; itself where there is none."""
        if not self.lark:
            return request
        constrained = pb.GenerateRequest()
        constrained.CopyFrom(request)
        constrained.sampling.grammar.lark = self.lark
        return constrained


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the served model is told about tools, and how it writes calls.

    family: a name in PARSERS, empty where it is not known; template: source of the chat template; takes_tools: whether
    it does anything with them; is_auto: the template tells the family; special_ids: all special tokens.
    """

    family: str = ""
    template: str = ""
    takes_tools: bool = False
    is_auto: bool = True
    special_ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, template: ChatTemplate, tokenizer: Tokenizer, parser: str) -> ToolFormat:
        """The format of a model. parser: a name in PARSERS, or "auto" for what the template tells the model."""
        family = parser_of_template(template.source) if parser == AUTO else parser
        special_ids = {text: tokenizer.token_id(text) for text in tokenizer.all_special_tokens}
        known = {text: token_id for text, token_id in special_ids.items() if token_id is not None}
        return cls(family, template.source, template.takes_tools, parser == AUTO, known)

    def _with_template(self, source: str) -> ToolFormat:
        """The format under a template that a request brings."""
        family = parser_of_template(source) if self.is_auto else self.family
        return dataclasses.replace(self, family=family, template=source, takes_tools="tools" in source)

    def use_of(self, request: pb.GenerateRequest) -> ToolUse | None:
        """What becomes of the request's tools; None where no call can come.

        Raises InvalidRequestError for tools or a choice that are wrong, or that the model's template cannot serve.
        """
        if request.WhichOneof("prompt") != "chat":
            return None
        chat = request.chat
        tools, choice = tools_of(chat), choice_of(chat)
        if not choice.allows:
            return None
        if chat.chat_template:
            return self._with_template(chat.chat_template)._use_of(request, tools, choice)
        return self._use_of(request, tools, choice)

    def _use_of(
        self, request: pb.GenerateRequest, tools: Sequence[ToolDefinition], choice: ToolChoice
    ) -> ToolUse | None:
        self._check_serves()
        if request.sampling.HasField("grammar"):
            if choice.is_required:
                raise InvalidRequestError(
                    "tool_choice requires a call, and a grammar or response format says what the answer is; "
                    "they exclude each other",
                    field="chat.tool_choice",
                )
            return None
        # Grammars of Python calls cannot be had, so a required call is written as the next of kin writes them.
        family = "llama3_json" if choice.is_required and self.family == "pythonic" else self.family
        lark = ""
        if choice.is_required or any(tool.strict for tool in tools):
            _check_has_grammar(family, tools)
            lark = call_grammar(
                family,
                [tool for tool in tools if choice.name in ("", tool.name)],
                is_required=choice.is_required,
                has_several=choice.allows_several,
                special_ids=self.special_ids,
                template=self.template,
            )
        marks = PARSERS[family].marks
        return ToolUse(
            family=family,
            tool_names=frozenset(tool.name for tool in tools),
            shown_token_ids=frozenset(self.special_ids[mark] for mark in marks if mark in self.special_ids),
            lark=lark,
            has_several=choice.allows_several,
            is_named=bool(choice.name),
        )

    def _check_serves(self) -> None:
        if not self.takes_tools:
            raise InvalidRequestError(
                "this model's chat template does nothing with tools; leave them out, set tool_choice to none, or start "
                "the server with a template that does, such as --chat-template hermes",
                field="chat.tools",
            )
        if not self.family:
            raise InvalidRequestError(
                "how this model writes tool calls is not known; start the server with --tool-call-parser "
                f"{', '.join(PARSERS)}",
                field="chat.tools",
            )


def _check_has_grammar(family: str, tools: Sequence[ToolDefinition]) -> None:
    if family == "pythonic":
        index = next(index for index, tool in enumerate(tools) if tool.strict)
        raise UnsupportedError(
            f"tools[{index}] is strict, which is not offered with calls in Python as this model writes them; leave "
            "strict out, or require a call",
            field=f"chat.tools[{index}].strict",
        )


NO_TOOLS = ToolFormat()


@contextlib.contextmanager
def naming_tools(use: ToolUse | None) -> Iterator[None]:
    """Errors about the grammar of a required or strict call name what the caller gave: the tools."""
    try:
        yield
    except InvalidRequestError as error:
        if use is not None and use.lark and error.field.startswith("sampling.grammar"):
            raise type(error)(
                f"a call that is required or strict takes a grammar, which is made of the tools: {error.message}",
                field="chat.tools",
            ) from None
        raise


class CallReader:
    """Reads the calls in the samples of one request. Not for use by two threads at once."""

    def __init__(self, use: ToolUse, held_text: Callable[[int], str] | None = None) -> None:
        """held_text: of a sample by its index, what the caller of a resumed request holds of its text."""
        self._use = use
        self._held_text = held_text
        self._parsers: dict[int, ToolParser] = {}

    def has_much_to_read(self, delta: pb.SampleDelta) -> bool:
        """Whether to read a delta takes longer than the event loop should wait."""
        index, length = delta.sample_index, len(delta.text)
        if self._held_text is not None and index not in self._parsers:
            length += len(self._held_text(index))
        return length > LONG_TEXT

    def read(self, delta: pb.SampleDelta, *, start: int = 0) -> None:
        """Adds to a sample's delta what its text says, from the character `start` on, and that it ended with calls."""
        parser = self._parser(delta.sample_index)
        delta.parsed.SetInParent()
        self._add(delta, parser.feed(delta.text[start:]))
        if delta.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            return
        self._add(delta, parser.finish())
        if delta.finish_reason == pb.FINISH_REASON_STOP and parser.num_calls and not self._use.is_named:
            delta.finish_reason = pb.FINISH_REASON_TOOL_CALLS

    def _parser(self, index: int) -> ToolParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = PARSERS[self._use.family](self._use.tool_names)
            if self._held_text is not None:
                # What it says went out with it.
                parser.feed(self._held_text(index))
        return parser

    def _add(self, delta: pb.SampleDelta, parsed: Parsed) -> None:
        delta.parsed.content += parsed.content
        calls = delta.parsed.tool_calls
        for piece in parsed.calls:
            if piece.index and not self._use.has_several:
                continue
            if not calls or calls[-1].index != piece.index or piece.name is not None:
                calls.add(index=piece.index)
            call = calls[-1]
            if piece.name is not None:
                call.id, call.name = self._new_id(), piece.name
            call.arguments_json += piece.arguments

    def _new_id(self) -> str:
        """A name for a call. Mistral's templates take ids of nine letters and digits only."""
        if self._use.family != "mistral":
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_ID_LENGTH))
