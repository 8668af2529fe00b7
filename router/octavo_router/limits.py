"""What a session's steps and requests must keep to. Checked on arrival, so that nothing is queued that could never
run."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo_router.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session's steps must keep to: the smaller of what the router was told and what the worker takes.

    num_host_blocks: 0 without a host tier. bytes_per_block and the two rates tell whether swapping or computing again
    is faster; a rate of 0 was not measured. model_digest: keys of cached prefixes hold for this model alone.
    vocab_size: tokens that a beam search has to choose from.
    """

    block_size: int
    num_device_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_plans_in_flight: int
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0
    bytes_per_block: int = 0
    prefill_tokens_per_s: float = 0.0
    swap_bytes_per_s: float = 0.0
    model_digest: str = ""
    vocab_size: int = 1 << 31

    @property
    def max_num_running(self) -> int:
        """Sequences in the batch. A step has a token for each of them."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_device_blocks * self.block_size

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError, mostly as ContextLengthError, for a request that no step or no pool could ever
        hold, naming the numbers."""
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
        if request.sampling.beams is not None:
            self._check_beams(request.sampling.beams.beam_width, num_prompt, total)

    def check_candidates(self, num_candidates: int) -> None:
        """Raises InvalidRequestError where a beam search needs more candidates of a beam than there are tokens."""
        if num_candidates > self.vocab_size:
            raise InvalidRequestError(
                f"this beam search needs {num_candidates} candidates a step, and the vocabulary has {self.vocab_size} "
                "tokens. Lower beam_width or give fewer stop_token_ids",
                field="sampling.beam_search.beam_width",
            )

    def _check_beams(self, beam_width: int, num_prompt: int, total: int) -> None:
        """Beams go on in step, so all of them must fit at once. They share the prompt's full blocks for certain."""
        if beam_width > self.max_num_running:
            raise InvalidRequestError(
                f"beam_width is {beam_width}; a step has at most {self.max_num_running} sequences. Lower beam_width",
                field="sampling.beam_search.beam_width",
            )
        num_shared = num_prompt // self.block_size
        num_own = -(-total // self.block_size) - num_shared
        num_blocks = num_shared + beam_width * num_own
        if num_blocks > self.num_device_blocks:
            raise ContextLengthError(
                f"{beam_width} beams of {total} tokens behind a prompt of {num_prompt} take up to {num_blocks} blocks "
                f"of {self.block_size}; the KV pool has {self.num_device_blocks}. Lower beam_width or max_tokens",
                field="stop.max_tokens",
            )
