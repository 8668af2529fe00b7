"""How model families write tool calls, and which family a chat template belongs to.

One parser a family, in a module of its own; `parser.py` says what all of them do.
"""

from __future__ import annotations

from typing import Final

from octavo_router.tool_parsers.hermes import HermesParser
from octavo_router.tool_parsers.llama3_json import Llama3JsonParser
from octavo_router.tool_parsers.mistral import MistralParser
from octavo_router.tool_parsers.parser import CallPiece, Parsed, ToolParser
from octavo_router.tool_parsers.pythonic import PythonicParser

__all__ = ["PARSERS", "CallPiece", "Parsed", "ToolParser", "parser_of_template"]

PARSERS: Final[dict[str, type[ToolParser]]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

# What only one family's templates say, the more telling first. Templates that ask for calls in XML within <tool_call>
# are of none of these.
_SIGNS = (
    ("<function=", ""),
    ("<arg_key>", ""),
    ("<invoke", ""),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
    ('"parameters": \' }}', "llama3_json"),
)


def parser_of_template(source: str) -> str:
    """The name in PARSERS of the family that a chat template tells to write calls; empty for none that is known."""
    return next((name for sign, name in _SIGNS if sign in source), "")
