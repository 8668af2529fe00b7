"""The prompts of `octavo generate`: plain lines or JSON lines in, jobs out; and its results, JSON lines again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from octavo.batch import ChatJob, Job, PromptJob, Result
from octavo.errors import InvalidRequestError, OctavoError, OverloadedError
from octavo.types import RequestOutput, SamplingParams, StructuredOutputsParams

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_PARAMS = frozenset(spec.name for spec in dataclasses.fields(SamplingParams)) - {"guided_decoding", "output_kind"}
_STRUCTURED = frozenset(spec.name for spec in dataclasses.fields(StructuredOutputsParams))


def is_json_lines(lines: Iterable[str]) -> bool:
    """Whether the first line is a JSON object with a prompt in it."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            return False
        return isinstance(found, dict) and any(key in found for key in _PROMPT_KEYS)
    return False


def plain_job(line: str, params: SamplingParams, *, chat: bool) -> Job:
    """A line of text as a prompt, or as the user's message."""
    return ChatJob([{"role": "user", "content": line}], params) if chat else PromptJob(line, params)


def json_job(line: str, params: SamplingParams) -> Job:
    """A line with "prompt", "prompt_token_ids" or "messages", and sampling parameters that hold for this line alone.

    Raises InvalidRequestError for anything else.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError(f"the line is not JSON: {error}") from None
    given = [key for key in _PROMPT_KEYS if isinstance(record, Mapping) and key in record]
    if len(given) != 1:
        raise InvalidRequestError(f"the line must be a JSON object with exactly one of {', '.join(_PROMPT_KEYS)}")
    own = {key: value for key, value in record.items() if key != given[0]}
    for key in own:
        if key not in _PARAMS:
            raise InvalidRequestError(f"the line has the unknown key {key!r}", field=key)
    if "structured_outputs" in own:
        own["structured_outputs"] = _structured(own["structured_outputs"])
    params = dataclasses.replace(params, **own)
    match given[0]:
        case "messages":
            return ChatJob(record["messages"], params)
        case "prompt_token_ids":
            return PromptJob({"prompt_token_ids": record["prompt_token_ids"]}, params)
    return PromptJob({"prompt": record["prompt"]}, params)


def _structured(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value.keys() <= _STRUCTURED:
        raise InvalidRequestError(
            f"structured_outputs must be an object with one of {', '.join(sorted(_STRUCTURED))}",
            field="structured_outputs",
        )
    return StructuredOutputsParams(**value)


def result_lines(index: int, result: Result) -> list[dict[str, Any]]:
    """What a prompt gave, one record a sample; an error is one record."""
    if isinstance(result, OctavoError):
        return [{"index": index, "error": _error_record(result)}]
    several = len(result.outputs) > 1
    return [
        {
            "index": index,
            **({"sample": output.index} if several else {}),
            "text": output.text,
            "token_count": len(output.token_ids),
            "prompt_token_count": result.usage.prompt_tokens if result.usage else None,
            "finish_reason": output.finish_reason,
        }
        for output in result.outputs
    ]


def _error_record(error: OctavoError) -> dict[str, Any]:
    record: dict[str, Any] = {"type": type(error).__name__, "message": error.message}
    if isinstance(error, InvalidRequestError) and error.field:
        record["field"] = error.field
    if isinstance(error, OverloadedError):
        record["retry_after_s"] = error.retry_after_s
    return record


class OrderedWriter:
    """Writes results in the order of their prompts, each as soon as those before it are written."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._next = 0
        self._waiting: dict[int, Result] = {}
        self.error_count = 0

    def take(self, index: int, result: Result) -> None:
        """Takes the result of a prompt; each index comes once."""
        self.error_count += not isinstance(result, RequestOutput)
        self._waiting[index] = result
        while self._next in self._waiting:
            for record in result_lines(self._next, self._waiting.pop(self._next)):
                self._target.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._target.flush()
            self._next += 1
