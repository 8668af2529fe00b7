"""What all bodies of OpenAI's API have in common here: strict types, no unknown fields, errors that name the field.

Types are strict: a number in quotes is not a number. `null` is the same as leaving a field out. Which bodies there are
is `openai_schema.py`'s and its neighbours'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from octavo.errors import InvalidRequestError, UnsupportedError

_SHOWN_LENGTH = 60
# Telling about an error takes some microseconds in which nothing else runs, and only the first is told.
_MAX_ERRORS = 100


# Values, beside null, with which a field that is not offered asks for nothing, by name.
Neutrals = Mapping[str, tuple[Any, ...]]


class Body(BaseModel):
    """Base of all bodies: strict, closed, and without NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class OfferedBody(Body):
    """A body some of whose known fields are not offered."""

    not_offered: ClassVar[Neutrals] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema, in which a field that is not offered may only have values that ask for nothing."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        for name, neutrals in cls.not_offered.items():
            schema["properties"][name] = {"enum": [None, *neutrals], "description": "Not offered by this server."}
        return reference

    def check_offered(self, path: str = "") -> None:
        """Raises UnsupportedError that names the first field set to something this server does not offer."""
        for name in self.model_fields_set & self.not_offered.keys():
            value = getattr(self, name)
            if value is None or any(_same(value, neutral) for neutral in self.not_offered[name]):
                continue
            raise UnsupportedError(f"{path}{name} is not offered by this server; leave it out", field=f"{path}{name}")


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


B = TypeVar("B", bound=Body)


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
    return InvalidRequestError(f"{path} is {shown(first['input'])}; {reason}", field=path)


def _path(location: tuple[int | str, ...]) -> str:
    """A field's path as people write it: messages[0].role."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def checked_texts(value: Any, types: Mapping[str, str], fields: Set[str]) -> Any:
    """The content of a message: text, or a list of the texts of its parts; None stays.

    types: which parts there may be, and the field of each that holds its text; fields: all that a part may have.
    Raises ValueError, for pydantic, that says what it must be.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("it must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or "type" not in part:
            example = f'{{"type": "{next(iter(types))}", "text": "..."}}'
            raise ValueError(f"each part must be an object with a type, such as {example}")
        # Any value may stand here, and not every one can be looked up.
        if part["type"] not in list(types):
            raise ValueError(f"part type {shown(part['type'])} is not offered by this server; only text is")
        text = part.get(types[part["type"]])
        if not isinstance(text, str) or not part.keys() <= fields:
            raise ValueError("a text part has the fields type and text, and text is a string")
        texts.append(text)
    return texts


def shown(value: Any) -> str:
    """A value as an error message shows it: JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
