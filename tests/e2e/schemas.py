"""Random JSON schemas, equal for equal seeds: the kinds that people ask language models for.

Every text has a bound and every property list is closed, so that an answer has an end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("name", "id", "city", "is_open", "price", "tags", "größe", "a b", "status", "items", "x", "notes")
_WORDS = ("red", "green", "blue", 'a "quoted" word', "naïve", "", "two words", "C:\\\\path", "end\n")
_PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^[a-z]+@[a-z]+\\.org$")
_MOST_DEPTH = 3


def random_schema(seed: int) -> Schema:
    """The schema of an object."""
    return _object(random.Random(seed), 0)


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [_string, _integer, _number, _boolean, _enum, _const]
    if depth < _MOST_DEPTH and rng.random() < 0.4:
        return rng.choice([_object, _array, _choice])(rng, depth + 1)
    return rng.choice(leaves)(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4 - depth // 2))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _choice(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth), rng.choice([{"type": "null"}, _string(rng), _integer(rng)])]}


def _string(rng: random.Random) -> Schema:
    if rng.random() < 0.25:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 20}
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    schema = {"type": "integer", "minimum": low, "maximum": low + rng.choice([1, 10, 5000])}
    if rng.random() < 0.2:
        schema = {"type": "integer", "exclusiveMinimum": -1, "maximum": 500, "multipleOf": rng.choice([2, 5, 10])}
    return schema


def _number(rng: random.Random) -> Schema:
    low = round(rng.uniform(-10, 10), 2)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.5, 3, 100]), "multipleOf": 0.01}


def _boolean(rng: random.Random) -> Schema:
    return {"type": "boolean"}


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample([*_WORDS, 7, -0.5, None, True], rng.randint(1, 4))}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice(_WORDS)}
