"""Ranges of the parameters of generation, for the OpenAPI document: what `validation.py` checks, as JSON Schema.

Only what holds whatever else a request says is here: that a prompt fits into the context, or n below best_of, no schema
can say.
"""

from __future__ import annotations

from typing import Any

from octavo_router import token_rules, validation

Json = dict[str, Any]

RANGES: dict[str, Json] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "n": {"minimum": 1, "maximum": validation.MAX_SAMPLES},
    "best_of": {"minimum": 1, "maximum": validation.MAX_SAMPLES},
    "beam_width": {"minimum": 1, "maximum": validation.MAX_BEAM_WIDTH},
    "length_penalty": {"minimum": -validation.MAX_LENGTH_PENALTY, "maximum": validation.MAX_LENGTH_PENALTY},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "presence_penalty": {"minimum": -token_rules.MAX_PENALTY, "maximum": token_rules.MAX_PENALTY},
    "frequency_penalty": {"minimum": -token_rules.MAX_PENALTY, "maximum": token_rules.MAX_PENALTY},
    "repetition_penalty": {"minimum": 0.01, "maximum": token_rules.MAX_REPETITION_PENALTY},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 0},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "prompt_logprobs": {"minimum": 0, "maximum": validation.MAX_LOGPROBS},
    "logprobs": {"minimum": 0, "maximum": validation.MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": validation.MAX_LOGPROBS},
    "stop": {"minLength": 1, "maxLength": validation.MAX_STOP_LENGTH, "maxItems": validation.MAX_STOP_STRINGS},
    "request_id": {"maxLength": validation.MAX_REQUEST_ID_LENGTH},
    "prompt": {"minLength": 1, "minItems": 1},
    "messages": {"minItems": 1},
    "input": {"minItems": 1},
}
# To which types of values a word applies.
_TYPES = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
}


def with_ranges(schema: Json) -> Json:
    """A body's schema with the ranges of its fields."""
    properties = {
        name: _bounded(value, RANGES[name]) if name in RANGES else value for name, value in schema["properties"].items()
    }
    return schema | {"properties": properties}


def _bounded(schema: Json, words: Json) -> Json:
    if "anyOf" in schema:
        return schema | {"anyOf": [_bounded(choice, words) for choice in schema["anyOf"]]}
    kind = schema.get("type")
    return schema | {word: bound for word, bound in words.items() if kind in _TYPES[word]}
