"""What a session's steps and requests must keep to. Checked on arrival, so that nothing is queued that could never
run."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ContextLengthError
from octavo_router.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session's steps must keep to: the smaller of what the router was told and what the worker takes."""

    block_size: int
    num_device_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_plans_in_flight: int
    enable_chunked_prefill: bool = True

    @property
    def max_num_running(self) -> int:
        """Sequences in the batch. A step has a token for each of them."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_device_blocks * self.block_size

    def check(self, request: Request) -> None:
        """Raises ContextLengthError for a request that no step or no pool could ever hold, naming the numbers."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.stopping.max_tokens
        total = num_prompt + max_tokens
        asked = f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, {total} together"
        if total > self.max_model_len:
            raise ContextLengthError(
                f"{asked}; the limit is {self.max_model_len}. Shorten the prompt or lower max_tokens",
                field="stop.max_tokens",
            )
        if total > self.pool_tokens:
            raise ContextLengthError(
                f"{asked}; the KV pool holds {self.pool_tokens} ({self.num_device_blocks} blocks of "
                f"{self.block_size}). Shorten the prompt or lower max_tokens",
                field="stop.max_tokens",
            )
        if not self.enable_chunked_prefill and num_prompt > self.max_num_batched_tokens:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens; without chunked prefill the limit is max_num_batched_tokens, "
                f"{self.max_num_batched_tokens}. Shorten the prompt",
                field="prompt",
            )
