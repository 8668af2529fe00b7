"""One sample while its tokens arrive: its text, where it ends, and which part of it its caller holds already.

Stop strings are the only ends that are found here, since only the text can tell them. When its text is sent, and what
becomes of its sequence, is `stream.py`'s and the engine's.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from octavo.errors import ResumeMismatchError
from octavo_router.request import FinishReason, Request, ResumedSample
from octavo_router.text_stream import TextStream
from octavo_router.tokenizer import Tokenizer

# So that a long text is never decoded at one go.
_MOST_UNDECODED = 64


@dataclass(frozen=True, slots=True)
class End:
    """Why a sample ended, and the stop string, or the stop or end-of-sequence token id, that matched."""

    reason: FinishReason
    matched: str | int | None = None


class Sample:
    """One sample's text and counts.

    num_tokens: all of its tokens; num_held: those of them that its caller held on arrival, held_text what they said;
    first_token_at: when the
    first of the others came, in the engine's clock; end: None while it goes on.
    """

    __slots__ = (
        "_request",
        "_text",
        "_undecoded",
        "_unsent_text",
        "cumulative_logprob",
        "end",
        "first_token_at",
        "held_text",
        "num_held",
        "num_tokens",
    )

    def __init__(self, request: Request, text: TextStream) -> None:
        self._request = request
        self._text = text
        self._undecoded: list[int] = []
        self._unsent_text = ""
        self.num_tokens = 0
        self.num_held = 0
        self.held_text = ""
        self.cumulative_logprob = 0.0
        self.first_token_at = 0.0
        self.end: End | None = None

    @property
    def num_new_tokens(self) -> int:
        """Tokens that came since its arrival."""
        return self.num_tokens - self.num_held

    @property
    def mean_logprob(self) -> float:
        """Log-probability of its tokens, in the mean. At least one token must have come."""
        return self.cumulative_logprob / self.num_tokens

    def append(self, token_id: int, end: End | None) -> None:
        """Takes the next token, with the end that it brings. A stop string that it completes is an end too, and counts
        before a limit; the token of another end adds text only with include_stop_in_text.
        """
        self.num_tokens += 1
        stopping = self._request.stopping
        is_stop_token = end is not None and end.matched is not None
        adds_text = not is_stop_token or stopping.include_stop_in_text
        if not stopping.stop:  # nothing depends on the text before it is taken
            if adds_text:
                self._undecoded.append(token_id)
                if len(self._undecoded) == _MOST_UNDECODED:
                    self._decode()
            self.end = end
            return
        may_stop = self.num_tokens >= stopping.min_tokens
        matched: str | None = None
        if adds_text:
            matched = self._text.append(token_id, may_stop=may_stop)
        if matched is None and end is not None:
            matched = self._text.finish(may_stop=may_stop)
        self.end = end if matched is None or is_stop_token else End(FinishReason.STOP, matched)

    def take_text(self) -> str:
        """The text that can be sent now and was not yet. May be empty."""
        text, self._unsent_text = self._unsent_text + self._decoded(), ""
        return text

    def _decoded(self) -> str:
        """The text that became final since the last call."""
        if self._undecoded:
            self._decode()
        if self.end is not None:
            self._text.finish()
        return self._text.take()

    def _decode(self) -> None:
        self._text.extend(self._undecoded)
        self._undecoded.clear()

    def resume(self, held: ResumedSample, stop_ids: Set[int]) -> bool:
        """Takes in what the caller holds, before any other token. Returns whether there is something to send at once:
        text that its tokens allow and that it has not got, or an end.

        A sample that had ended stays as it was. Raises ResumeMismatchError where the request cannot have given this.
        """
        self.num_held = len(held.token_ids)
        self.cumulative_logprob = held.cumulative_logprob
        if held.finish_reason is not None:
            self.num_tokens = self.num_held
            self.end = End(held.finish_reason)
            return False
        max_tokens = self._request.stopping.max_tokens
        for token_id in held.token_ids:
            if self.end is not None:
                raise ResumeMismatchError(
                    f"the resume holds {self.num_held} tokens of sample {held.sample_index}, which ends behind "
                    f"{self.num_tokens}; send the request as it was"
                )
            end = None
            if token_id in stop_ids:
                end = End(FinishReason.STOP, token_id)
            elif self.num_tokens + 1 == max_tokens:
                end = End(FinishReason.LENGTH)
            self.append(token_id, end)
        text = self._decoded()
        self._unsent_text = _behind(text, held)
        self.held_text = text[: len(text) - len(self._unsent_text)]
        return self._unsent_text != "" or self.end is not None


def blank_text(request: Request, tokenizer: Tokenizer) -> TextStream:
    """The text of a request's samples, to begin each one's with. Raises InvalidRequestError for stop strings that
    cannot be looked for.
    """
    return TextStream(
        tokenizer,
        skip_special_tokens=request.output.skip_special_tokens,
        spaces_between_special_tokens=request.output.spaces_between_special_tokens,
        shown_special_ids=request.output.shown_special_ids,
        stop=request.stopping.stop,
        include_stop=request.stopping.include_stop_in_text,
    )


def _behind(text: str, held: ResumedSample) -> str:
    """The text behind what is held of it."""
    data = text.encode()
    try:
        if held.text_byte_count > len(data):
            raise ValueError
        return data[held.text_byte_count :].decode()
    except ValueError:
        raise ResumeMismatchError(
            f"the resume holds {held.text_byte_count} bytes of text of sample {held.sample_index}, which cannot be: "
            f"its tokens gave {len(data)} bytes, in whole characters. Send the length of the text that was received"
        ) from None
