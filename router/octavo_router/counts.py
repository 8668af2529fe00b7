"""What the scheduler and its memory have done since the router started, for metrics and for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Only ever grow, and outlive sessions.

    num_prefix_query_tokens: prompt tokens of requests that started; num_prefix_hit_tokens: how many of them were in the
    prefix cache, num_prefix_hit_host_tokens: of these, on the host. num_evictions: cached blocks that left the device,
    num_demotions: how many of them went to the host. num_priority_preemptions: preempted sequences that gave their
    places to a request with a better priority.
    """

    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_prefix_hit_host_tokens: int = 0
    num_evictions: int = 0
    num_demotions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0
    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_priority_preemptions: int = 0

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their blocks, however often."""
        return self.num_recompute_preemptions + self.num_swap_preemptions
