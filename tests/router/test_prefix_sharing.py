"""Nothing is computed twice: forks of a group's prompt, cached prefixes on both tiers, and waiting for what another one
computes. In a plan, "new A (9+0 tokens) [0 1]" starts A with blocks 0 and 1, and "copy 1->2" copies a block."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo_router.sequence import SequenceStatus
from tests.router.fake_worker import expected_output
from tests.router.harness import Harness, make_limits, make_request

Golden = Callable[[str, str], None]


def test_transcript_fork_with_copy_on_write(golden: Golden) -> None:
    """The prompt is computed once; each other sample shares its full block, copies the one it writes to, and computes
    the last prompt token for a first token of its own."""
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=6, max_tokens=4, n=3))
    harness.run()
    golden("fork_with_copy_on_write", harness.transcript)


def test_transcript_prefix_hit(golden: Golden) -> None:
    """The full blocks of the common prefix are there already; the last token is computed though its block is cached."""
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=10, max_tokens=3, cache_salt=""))
    harness.run()
    harness.add(make_request("B", num_prompt=12, max_tokens=3, cache_salt=""))
    harness.run()
    assert harness.groups["B"].num_cached_tokens == 8
    golden("prefix_hit", harness.transcript)


def test_transcript_prefix_hit_on_the_host(golden: Golden) -> None:
    """A prefix that was evicted went to the host by the plan that took its blocks, and comes back by a swap in."""
    harness = Harness(make_limits(num_blocks=5, num_host_blocks=4))
    harness.add(make_request("A", num_prompt=9, max_tokens=2, cache_salt=""))
    harness.run()
    harness.add(make_request("B", num_prompt=16, max_tokens=2))
    harness.run()
    assert harness.scheduler.counts.num_demotions == 2
    harness.add(make_request("C", num_prompt=9, max_tokens=2, cache_salt=""))
    harness.run()
    counts = harness.scheduler.counts
    assert (counts.num_prefix_hit_tokens, counts.num_prefix_hit_host_tokens) == (8, 8)
    golden("prefix_hit_on_the_host", harness.transcript)


def test_transcript_waiting_for_anothers_prefix(golden: Golden) -> None:
    """B waits for the result that brings the common blocks, C passes it meanwhile."""
    harness = Harness(make_limits(max_num_tokens=8))
    harness.add(make_request("A", num_prompt=13, max_tokens=3, cache_salt=""))
    harness.add(make_request("B", num_prompt=14, max_tokens=3, seed=1, cache_salt=""))
    harness.add(make_request("C", num_prompt=2, max_tokens=3))
    harness.run()
    assert harness.groups["B"].num_cached_tokens == 12
    golden("waiting_for_anothers_prefix", harness.transcript)


def count_computed(harness: Harness) -> int:
    """Runs to the end and counts the tokens that steps computed."""
    num_tokens = 0
    while harness.scheduler.num_requests:
        while (plan := harness.send()) is not None:
            num_tokens += plan.num_tokens
        if harness.in_flight:
            harness.answer()
    return num_tokens


def test_requests_that_arrive_together_compute_their_prefix_once() -> None:
    harness = Harness(make_limits(max_num_seqs=16))
    for index in range(10):
        harness.add(make_request(str(index), num_prompt=33, max_tokens=1, seed=index, cache_salt=""))
    assert count_computed(harness) == 33 + 9
    for index in range(10):
        assert harness.output(str(index)) == expected_output(make_request(num_prompt=33, max_tokens=1, seed=index))[0]
    counts = harness.scheduler.counts
    assert (counts.num_prefix_query_tokens, counts.num_prefix_hit_tokens) == (330, 288)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("num_prompt", "num_shared"), [(12, 11), (13, 12), (14, 13)])
def test_samples_compute_one_token_of_the_prompt_each(
    num_prompt: int, num_shared: int, enable_prefix_caching: bool
) -> None:
    harness = Harness(make_limits(enable_prefix_caching=enable_prefix_caching))
    harness.add(make_request("A", num_prompt=num_prompt, max_tokens=1, n=4))
    assert count_computed(harness) == num_prompt + 3
    # 12 tokens fill three blocks, of which the last is copied; behind 13 the fourth is shared by nobody.
    assert harness.scheduler.counts.num_copied_blocks == (0 if num_shared % 4 == 0 else 3)


def test_output_is_found_as_well() -> None:
    harness = Harness(make_limits())
    first = make_request("A", num_prompt=6, max_tokens=7, cache_salt="")
    harness.add(first)
    harness.run()
    conversation = [*first.prompt_token_ids, *harness.output("A"), 9, 9]
    second = make_request("B", num_prompt=1, max_tokens=2, cache_salt="")
    object.__setattr__(second, "prompt_token_ids", conversation)
    harness.add(second)
    harness.run()
    # 12 of 13 tokens were computed: the last one that was sampled was not.
    assert harness.groups["B"].num_cached_tokens == 12
    assert harness.output("B") == expected_output(second)[0]


def test_salts_and_models_share_nothing() -> None:
    harness = Harness(make_limits())
    for name, salt in (("A", "x"), ("B", "y"), ("C", "x")):
        harness.add(make_request(name, num_prompt=9, cache_salt=salt))
        harness.run()
    assert [harness.groups[name].num_cached_tokens for name in "ABC"] == [0, 0, 8]


def test_without_prefix_caching_nothing_is_kept() -> None:
    harness = Harness(make_limits(enable_prefix_caching=False))
    for name in "AB":
        harness.add(make_request(name, num_prompt=9, cache_salt=""))
    harness.run()
    harness.add(make_request("C", num_prompt=9, cache_salt=""))
    harness.run()
    assert [harness.groups[name].num_cached_tokens for name in "ABC"] == [0, 0, 0]
    assert harness.scheduler.blocks.device.num_cached == 0


def test_a_block_is_shared_only_when_the_result_is_there() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=8, max_tokens=9, cache_salt=""))
    harness.send()
    harness.add(make_request("B", num_prompt=9, max_tokens=1, seed=1, cache_salt=""))
    plan = harness.send()
    assert plan is not None
    assert not plan.new_sequences, "A's result is not there, so B waits"
    assert len(harness.scheduler.blocks.cache) == 0
    harness.answer()
    assert len(harness.scheduler.blocks.cache) == 2
    harness.run()
    assert harness.groups["B"].num_cached_tokens == 8


def test_nothing_of_a_lost_session_is_shared() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=9, max_tokens=1, cache_salt=""))
    harness.run()
    harness.disconnect()
    harness.connect()
    harness.add(make_request("B", num_prompt=9, max_tokens=1, cache_salt=""))
    harness.run()
    assert harness.groups["B"].num_cached_tokens == 0


def test_a_token_past_the_end_is_not_published() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=7, max_tokens=9, cache_salt=""))
    sequence = harness.groups["A"].sequences[0]
    harness.send()
    harness.send()
    harness.answer()
    harness.scheduler.finish(sequence)
    harness.answer()
    # The second plan computed position 7, which filled the second block, for a sequence that had ended.
    assert len(harness.scheduler.blocks.cache) == 1
    harness.run()


@pytest.mark.parametrize("how", ["cancel", "finish", "disconnect"])
def test_who_waits_goes_on_when_the_one_it_waits_for_is_gone(how: str) -> None:
    harness = Harness(make_limits(max_num_tokens=8))
    first = harness.add(make_request("A", num_prompt=40, max_tokens=5, cache_salt=""))
    waits = harness.add(make_request("B", num_prompt=41, max_tokens=5, seed=1, cache_salt=""))
    harness.step()
    assert harness.scheduler.waiting.num_parked == 1
    assert waits.sequences[0].status is SequenceStatus.WAITING
    if how == "cancel":
        harness.cancel("A")
    elif how == "finish":
        harness.scheduler.finish(first.sequences[0])
    else:
        harness.disconnect()
        harness.connect()
    assert harness.scheduler.waiting.num_parked == 0
    harness.run()
    assert harness.output("B") == expected_output(waits.request)[0]


def test_a_crowd_that_waits_for_one_prefix_does_not_stand_aside_all_at_once() -> None:
    harness = Harness(make_limits(max_num_tokens=8, max_num_seqs=3))
    for index in range(20):
        harness.add(make_request(str(index), num_prompt=20, max_tokens=2, seed=index, cache_salt=""))
    harness.step()
    assert harness.scheduler.waiting.num_parked == 3
    harness.run()
    assert harness.scheduler.counts.num_prefix_hit_tokens == 19 * 16


def test_a_parked_request_can_be_cancelled() -> None:
    harness = Harness(make_limits(max_num_tokens=8))
    harness.add(make_request("A", num_prompt=40, max_tokens=2, cache_salt=""))
    harness.add(make_request("B", num_prompt=41, max_tokens=2, cache_salt=""))
    harness.step()
    harness.cancel("B")
    assert harness.scheduler.waiting.num_parked == 0
    harness.run()


def test_a_flush_leaves_running_requests_alone() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", num_prompt=9, max_tokens=2, cache_salt=""))
    harness.run()
    harness.add(make_request("B", num_prompt=21, max_tokens=9, seed=3, cache_salt=""))
    harness.step()
    assert harness.scheduler.flush_prefix_cache() == 0, "B holds both blocks"
    harness.check()
    harness.run()
    assert harness.output("B") == expected_output(harness.groups["B"].request)[0]
    assert harness.scheduler.flush_prefix_cache() > 0
    assert harness.scheduler.blocks.device.num_cached == 0


def test_cached_blocks_are_as_good_as_free() -> None:
    harness = Harness(make_limits(num_blocks=8))
    for index in range(20):
        harness.add(make_request(str(index), num_prompt=20, max_tokens=8))
        harness.run()
        assert harness.scheduler.blocks.device.num_cached > 0
    assert harness.scheduler.num_preemptions == 0
    assert harness.scheduler.counts.num_evictions > 0


def test_a_preempted_sample_shares_the_prompt_again() -> None:
    harness = Harness(make_limits(num_blocks=12, enable_prefix_caching=False))
    request = make_request("A", num_prompt=16, max_tokens=20, n=3)
    harness.add(request)
    harness.run()
    assert harness.scheduler.counts.num_recompute_preemptions > 0
    for index in range(3):
        assert harness.output("A", index) == expected_output(request, index)[0]
