"""Log-probabilities as OpenAI's and vLLM's JSON: token strings, offsets in the text, and the prompt's own.

A token's string is its own text; one that is not whole characters is written as OpenAI writes it, `bytes:\\xe2\\x9c`.
So the strings joined are the text, but for characters that several tokens share.

Offsets count characters from the start of the prompt, as OpenAI's do: without echo too, the first generated token has
the offset that is the prompt's length. A token that goes on with a character begins where it does, and one that the
text does not show (a special token that the tokenizer put around it) takes no room.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any

from octavo.v1 import inference_pb2 as pb

# What OpenAI says for a probability too small to matter; JSON has no infinity.
MIN_LOGPROB = -9999.0

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]


def token_text(data: bytes) -> str:
    """A token's string."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    # The comparison is false for NaN too.
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


class CompletionLogprobs:
    """The `logprobs` object of one choice of /v1/completions, part by part in the order of the text.

    token_bytes: the UTF-8 of a token's text; prompt_text: the prompt as it would be echoed.
    """

    def __init__(self, token_bytes: TokenBytes, prompt_text: str) -> None:
        self._token_bytes = token_bytes
        self._prompt_text = prompt_text
        self._offset = _TextOffset(len(prompt_text))

    def of_prompt(self, prompt: pb.PromptInfo, num_top: int) -> Json:
        """The part of an echoed prompt, which comes before the sampled tokens. The first token has null in place of
        numbers. num_top: how many likeliest tokens to show beside each.
        """
        part = _empty_part()
        offset = _PromptOffset(self._prompt_text)
        for index, (token_id, entry) in enumerate(zip(prompt.token_ids, prompt.logprobs, strict=True)):
            data = self._token_bytes(token_id)
            self._add(part, data, offset.of(data), entry if index else None, num_top)
        return part

    def of_tokens(self, entries: Iterable[pb.TokenLogprobs], part: Json | None = None) -> Json:
        """The part of sampled tokens, or `part` with them behind it."""
        part = part or _empty_part()
        for entry in entries:
            data = self._token_bytes(entry.token_id)
            self._add(part, data, self._offset.of(data), entry, len(entry.top))
        return part

    def _add(self, part: Json, data: bytes, offset: int, entry: pb.TokenLogprobs | None, num_top: int) -> None:
        token = token_text(data)
        part["tokens"].append(token)
        part["text_offset"].append(offset)
        if entry is None:
            part["token_logprobs"].append(None)
            part["top_logprobs"].append(None)
            return
        logprob = finite(entry.logprob)
        part["token_logprobs"].append(logprob)
        # The token itself is always there; where two tokens have one text, the likelier one is.
        top: dict[str, float] = {}
        for likely in entry.top[:num_top]:
            top.setdefault(token_text(self._token_bytes(likely.token_id)), finite(likely.logprob))
        top.setdefault(token, logprob)
        part["top_logprobs"].append(top)


def prompt_logprobs(prompt: pb.PromptInfo, num_top: int, token_bytes: TokenBytes) -> list[Json | None]:
    """The prompt's log-probabilities as vLLM's `prompt_logprobs`: by token id, the prompt's token first; null for the
    first token. rank: 1 is the likeliest; null where the token is not among the num_top likeliest.
    """

    def value(logprob: float, rank: int | None, token_id: int) -> Json:
        text = token_bytes(token_id).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    answer: list[Json | None] = [None]
    for entry in prompt.logprobs[1:]:
        ranks = {likely.token_id: rank for rank, likely in enumerate(entry.top[:num_top], 1)}
        values = {str(entry.token_id): value(entry.logprob, ranks.get(entry.token_id), entry.token_id)}
        for likely in entry.top[:num_top]:
            values.setdefault(str(likely.token_id), value(likely.logprob, ranks[likely.token_id], likely.token_id))
        answer.append(values)
    return answer


def _empty_part() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class _TextOffset:
    """Where tokens begin in the text that they make, in characters."""

    def __init__(self, start: int) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, data: bytes) -> int:
        """The offset of the next token, whose bytes these are."""
        offset = self._offset
        self._offset += len(self._decoder.decode(data))
        return offset


class _PromptOffset:
    """Where a prompt's tokens begin in its text, which is given: not every token need be in it."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._num_read = 0
        self._offset = _TextOffset(0)

    def of(self, data: bytes) -> int:
        """The offset of the next token, whose bytes these are."""
        # A text's first word is often tokenized with a space before it that the text has not.
        for shown in (data, data[1:] if data.startswith(b" ") else b""):
            if shown and self._text.startswith(shown, self._num_read):
                self._num_read += len(shown)
                return self._offset.of(shown)
        return self._offset.of(b"")
