"""The log-probabilities of one request's prompt, collected while it is computed.

They come in stretches, one for each chunk. A sequence that lost its blocks in the middle of its prompt computes it
again and brings again what was there already; that is dropped, so nothing is doubled and nothing lost. What is not
computed is not scored, so a prompt takes from the prefix cache only what it has the scores of (`prefix_sharing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo_router.plan import LogprobColumns
from octavo_router.request import TokenLogprobs


class PromptScores:
    """The log-probabilities of a prompt's tokens from the second on: nothing stands before the first.

    num_scored: how many are there, in order.
    """

    __slots__ = ("_columns", "_num_wanted", "num_scored")

    def __init__(self, num_prompt_tokens: int) -> None:
        self._columns = LogprobColumns()
        self._num_wanted = num_prompt_tokens - 1
        self.num_scored = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self.num_scored == self._num_wanted

    def num_due(self, num_computed: int) -> int:
        """How many must be there once so many tokens of the sequence are computed: each one scores the next."""
        return min(num_computed, self._num_wanted)

    def num_reusable(self, num_tokens: int) -> int:
        """Of so many first tokens, those that may come from the prefix cache, since their scores are there."""
        return num_tokens if self.is_complete else min(num_tokens, self.num_scored)

    def num_after(self, start_position: int, columns: LogprobColumns) -> int:
        """How many will be there with a stretch that begins at this position. Changes nothing.

        Raises ValueError for one that leaves a gap, goes beyond the prompt, or whose columns do not fit.
        """
        end = start_position + len(columns.logprobs) - 1
        if not 1 <= start_position <= self.num_scored + 1 or end > self._num_wanted:
            raise ValueError(
                f"tokens {start_position} to {end} are scored; {self.num_scored + 1} to {self._num_wanted} are due"
            )
        if len(columns.top_counts) != len(columns.logprobs):
            raise ValueError(f"{len(columns.top_counts)} counts came for {len(columns.logprobs)} tokens")
        num_top = sum(columns.top_counts)
        if not len(columns.top_token_ids) == len(columns.top_logprobs) == num_top:
            raise ValueError(f"{len(columns.top_token_ids)} likeliest tokens came, {num_top} are counted")
        return max(self.num_scored, end)

    def add(self, start_position: int, columns: LogprobColumns) -> bool:
        """Takes a stretch, without what is there already. Returns whether it completes them. Raises as num_after."""
        num_scored = self.num_after(start_position, columns)
        if num_scored == self.num_scored:
            return False
        known = self.num_scored + 1 - start_position
        known_top = sum(columns.top_counts[:known])
        mine = self._columns
        mine.logprobs.extend(columns.logprobs[known:])
        mine.top_counts.extend(columns.top_counts[known:])
        mine.top_token_ids.extend(columns.top_token_ids[known_top:])
        mine.top_logprobs.extend(columns.top_logprobs[known_top:])
        self.num_scored = num_scored
        return self.is_complete

    def entries(self, prompt_token_ids: Sequence[int]) -> Iterator[TokenLogprobs]:
        """An entry for each token from the second on, once they are complete. prompt_token_ids: the whole prompt."""
        columns, begin = self._columns, 0
        for token_id, logprob, count in zip(prompt_token_ids[1:], columns.logprobs, columns.top_counts, strict=True):
            end = begin + count
            top = zip(columns.top_token_ids[begin:end], columns.top_logprobs[begin:end], strict=True)
            yield TokenLogprobs(token_id, logprob, tuple(top))
            begin = end
