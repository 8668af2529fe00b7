"""Structured output in OpenAI's bodies: response_format, vLLM's structured_outputs and its older guided_ fields.

All of them become the contract's Grammar. Schemas keep the order of their keys. Whether a grammar is one is not looked
at here: `grammar.py` does that for every front end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, Field, WithJsonSchema

from octavo.errors import InvalidRequestError
from octavo.v1 import sampling_pb2
from octavo_router.openai_body import Body, Neutrals, OfferedBody


def _checked_schema(value: Any) -> Any:
    """A JSON schema: an object, or JSON text."""
    if value is None or isinstance(value, str | dict):
        return value
    raise ValueError("it must be a JSON schema: an object, or JSON text")


Choices = Annotated[list[str], Field(fail_fast=True)]
Schema = Annotated[
    Any,
    BeforeValidator(_checked_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
]


class JsonSchemaFormat(Body):
    """A named JSON schema. The name and the description are for people; strict or not, the output matches it."""

    json_schema: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What an answer looks like, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(OfferedBody):
    """What an answer looks like, as in vLLM's API: one of json, regex, choice, grammar, json_object."""

    # Without whitespace of the model's own choice, either value of disable_any_whitespace is kept.
    not_offered: ClassVar[Neutrals] = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False, True),
        "disable_fallback": (False, True),
        "structural_tag": (),
        "whitespace_pattern": (),
    }

    json_schema: Schema = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    disable_additional_properties: Any = None
    disable_any_whitespace: Any = None
    disable_fallback: Any = None
    structural_tag: Any = None
    whitespace_pattern: Any = None


class GrammarFields(Protocol):
    """The fields of a body that ask for structured output."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def grammar_of(body: GrammarFields) -> sampling_pb2.Grammar | None:
    """The grammar that a body asks for; None for none. Raises InvalidRequestError where it asks twice, or halfway."""
    asked = list(_asked(body))
    if len(asked) > 1:
        raise InvalidRequestError(
            f"{asked[0][0]} and {asked[1][0]} are given; an answer matches one of them, so leave the other out",
            field=asked[1][0],
        )
    return asked[0][1] if asked else None


def grammar_param(body: GrammarFields) -> str:
    """The field of a body that a complaint about its grammar names; empty where there is none."""
    return next((name.partition(".")[0] for name, _ in _asked(body)), "")


def schema_grammar(schema: Mapping[str, Any] | str) -> sampling_pb2.Grammar:
    """The grammar of a JSON schema, given as an object or as text."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return sampling_pb2.Grammar(json_schema=text)


def _asked(body: GrammarFields) -> Iterator[tuple[str, sampling_pb2.Grammar]]:
    """Each grammar that a body asks for, with the name of the field."""
    if (grammar := _response_format(body.response_format)) is not None:
        yield "response_format", grammar
    outputs = body.structured_outputs
    if outputs is not None:
        outputs.check_offered("structured_outputs.")
        named = {
            "json": outputs.json_schema,
            "regex": outputs.regex,
            "choice": outputs.choice,
            "grammar": outputs.grammar,
            # False asks for nothing.
            "json_object": outputs.json_object or None,
        }
        given = [
            (f"structured_outputs.{name}", _grammar(name, value)) for name, value in named.items() if value is not None
        ]
        if not given:
            raise InvalidRequestError(
                "structured_outputs is empty; give one of json, regex, choice, grammar, json_object",
                field="structured_outputs",
            )
        yield from given
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{name}")) is not None:
            yield f"guided_{name}", _grammar(name, value)


def _response_format(form: ResponseFormat | None) -> sampling_pb2.Grammar | None:
    if form is None:
        return None
    if (form.json_schema is not None) != (form.type == "json_schema"):
        wrong = "missing; it is required" if form.json_schema is None else "given; leave it out"
        raise InvalidRequestError(
            f"response_format.json_schema is {wrong} with type {form.type}", field="response_format.json_schema"
        )
    if form.json_schema is not None:
        return schema_grammar(form.json_schema.json_schema)
    return sampling_pb2.Grammar(json_object=True) if form.type == "json_object" else None


def _grammar(name: str, value: Any) -> sampling_pb2.Grammar:
    """A grammar by the name that vLLM gives its kind."""
    if name == "json":
        return schema_grammar(value)
    if name == "regex":
        return sampling_pb2.Grammar(regex=value)
    if name == "choice":
        choices: Sequence[str] = value
        return sampling_pb2.Grammar(choices=sampling_pb2.Choices(choices=choices))
    return sampling_pb2.Grammar(lark=value) if name == "grammar" else sampling_pb2.Grammar(json_object=True)
