"""Who gives up blocks, and by which way. "out 2->h0" moves a block to the host, "in h0->3" one back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo_router import preemption
from octavo_router.preemption import MOST_EVICTIONS
from octavo_router.request import Beams
from octavo_router.results import TokenSampled
from octavo_router.sequence import SequenceStatus
from tests.router.fake_worker import expected_hypotheses, expected_output
from tests.router.harness import Harness, make_limits, make_request

Golden = Callable[[str, str], None]


def test_transcript_swap(golden: Golden) -> None:
    """The younger one's blocks go to the host and come back; nothing of it is computed twice."""
    harness = Harness(make_limits(num_blocks=4, num_host_blocks=4, swaps=True))
    harness.add(make_request("A", num_prompt=6, max_tokens=7))
    harness.add(make_request("B", num_prompt=4, max_tokens=6))
    harness.run()
    counts = harness.scheduler.counts
    assert (counts.num_swap_preemptions, counts.num_recompute_preemptions) == (1, 0)
    golden("swap", harness.transcript)


def run_two(harness: Harness) -> None:
    """A and B, of which B has to give way."""
    requests = [make_request("A", num_prompt=6, max_tokens=7), make_request("B", num_prompt=4, max_tokens=6)]
    for request in requests:
        harness.add(request)
    harness.run()
    for request in requests:
        assert harness.output(request.request_id) == expected_output(request)[0]


@pytest.mark.parametrize(
    ("num_host_blocks", "prefill_tokens_per_s", "swap_bytes_per_s", "swaps"),
    [
        (4, 1000.0, 1e9, True),
        (1, 1000.0, 1e9, False),  # B's two blocks do not fit on the host
        (0, 1000.0, 1e9, False),
        (4, 0.0, 1e9, False),  # not measured
        (4, 1000.0, 0.0, False),
        # Two blocks of 1,024 bytes go out and in, or 8 tokens are computed.
        (4, 8.0, 4100.0, True),
        (4, 8.0, 4090.0, False),
    ],
)
def test_the_cheaper_way_is_taken(
    num_host_blocks: int, prefill_tokens_per_s: float, swap_bytes_per_s: float, swaps: bool
) -> None:
    limits = make_limits(num_blocks=4, num_host_blocks=num_host_blocks)
    object.__setattr__(limits, "prefill_tokens_per_s", prefill_tokens_per_s)
    object.__setattr__(limits, "swap_bytes_per_s", swap_bytes_per_s)
    harness = Harness(limits)
    run_two(harness)
    counts = harness.scheduler.counts
    assert (counts.num_swap_preemptions, counts.num_recompute_preemptions) == ((1, 0) if swaps else (0, 1))
    assert (harness.scheduler.blocks.host.num_used, harness.num_used) == (0, 0)


def swap_out_b() -> Harness:
    """A has started to need B's blocks, and B is on the host."""
    harness = Harness(make_limits(num_blocks=8, num_host_blocks=20, swaps=True))
    harness.add(make_request("A", num_prompt=6, max_tokens=24))
    harness.add(make_request("B", num_prompt=5, max_tokens=20, n=2))
    for _ in range(100):
        harness.step()
        if harness.scheduler.counts.num_swap_preemptions:
            return harness
    raise AssertionError("nobody was swapped out")


def test_a_group_is_swapped_as_a_unit_and_stays_shared() -> None:
    harness = swap_out_b()
    samples = harness.groups["B"].sequences
    assert [sample.status for sample in samples] == [SequenceStatus.SWAPPED] * 2
    assert samples[0].host_table[0] == samples[1].host_table[0]
    assert harness.scheduler.waiting.num_preempted == 2
    assert harness.scheduler.num_waiting == 0
    harness.run()
    for index in range(2):
        assert harness.output("B", index) == expected_output(harness.groups["B"].request, index)[0]


@pytest.mark.parametrize("how", ["cancel", "finish", "disconnect"])
def test_a_swapped_request_can_go_any_way(how: str) -> None:
    harness = swap_out_b()
    if how == "cancel":
        harness.cancel("B")
        assert harness.scheduler.blocks.host.num_used == 0
    elif how == "finish":
        harness.scheduler.finish(harness.groups["B"].sequences[1])
    else:
        harness.disconnect()
        assert {sample.status for sample in harness.groups["B"].sequences} == {SequenceStatus.PREEMPTED}
        harness.connect()
    harness.check()
    harness.run()
    if how != "cancel":
        assert harness.output("B") == expected_output(harness.groups["B"].request)[0]
    assert (harness.scheduler.blocks.host.num_used, harness.num_used, harness.worker.num_used) == (0, 0, 0)


def test_samples_make_room_for_the_first_of_their_own() -> None:
    harness = Harness(make_limits(num_blocks=10))
    request = make_request("A", num_prompt=4, max_tokens=30, n=4)
    harness.add(request)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert harness.groups["A"].sequences[0].num_preemptions == 0
    for index in range(4):
        assert harness.output("A", index) == expected_output(request, index)[0]


def test_beams_give_way_together() -> None:
    harness = Harness(make_limits(num_blocks=14))
    request = make_request("B", num_prompt=6, max_tokens=12, beams=Beams(3))
    harness.add(make_request("A", num_prompt=6, max_tokens=40))
    harness.add(request)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert {beam.num_preemptions for beam in harness.groups["B"].sequences} == {1}
    assert harness.hypotheses("B") == expected_hypotheses(request)


# Arrivals with a better priority


def check_outputs(harness: Harness) -> None:
    for request_id, group in harness.groups.items():
        if group.request.sampling.beams is not None:
            assert harness.hypotheses(request_id) == expected_hypotheses(group.request)
            continue
        for index in range(len(group.sequences)):
            assert harness.output(request_id, index) == expected_output(group.request, index)[0]


def order_of_ends(harness: Harness) -> list[str]:
    ends = [event for event in harness.events if isinstance(event, TokenSampled) and event.finish_reason]
    return [event.sequence.group.request.request_id for event in ends]


@pytest.mark.parametrize("swaps", [False, True])
def test_a_better_priority_takes_a_place(swaps: bool) -> None:
    """Two places, four long requests, then a short urgent one: it need not wait for any of them."""
    harness = Harness(make_limits(max_num_seqs=2, num_host_blocks=50, swaps=swaps))
    for index in range(4):
        harness.add(make_request(f"L{index}", num_prompt=6, max_tokens=40, priority=1))
    for _ in range(5):
        harness.step()
    harness.add(make_request("H", num_prompt=6, max_tokens=5))
    for _ in range(3):
        harness.step()
    assert harness.running == ["H", "L0"]
    harness.run()
    assert order_of_ends(harness) == ["H", "L0", "L1", "L2", "L3"]
    counts = harness.scheduler.counts
    assert (counts.num_priority_preemptions, counts.num_preemptions) == (1, 1)
    assert counts.num_swap_preemptions == swaps
    check_outputs(harness)


def test_a_better_priority_takes_blocks() -> None:
    harness = Harness(make_limits(num_blocks=20))
    for index in range(3):
        harness.add(make_request(f"L{index}", num_prompt=16, max_tokens=20, priority=1))
    for _ in range(2):
        harness.step()
    assert harness.running == ["L0", "L1", "L2"]
    harness.add(make_request("H", num_prompt=40, max_tokens=4))
    for _ in range(4):
        harness.step()
    assert harness.running == ["H", "L0"]
    harness.run()
    assert order_of_ends(harness)[0] == "H"
    assert harness.scheduler.counts.num_priority_preemptions == 2
    check_outputs(harness)


@pytest.mark.parametrize("priority", [1, 2])
def test_equals_and_betters_are_left_alone(priority: int) -> None:
    harness = Harness(make_limits(max_num_seqs=2))
    for index in range(2):
        harness.add(make_request(f"L{index}", max_tokens=20, priority=1))
    harness.step()
    harness.add(make_request("H", max_tokens=5, priority=priority))
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    assert order_of_ends(harness)[-1] == "H"


def test_nobody_gives_way_where_that_is_not_enough() -> None:
    """The urgent request would need the blocks of its equal as well."""
    harness = Harness(make_limits(num_blocks=20))
    harness.add(make_request("E", num_prompt=40, max_tokens=8))
    harness.add(make_request("L", num_prompt=8, max_tokens=20, priority=1))
    harness.step()
    assert harness.running == ["E", "L"]
    harness.add(make_request("H", num_prompt=50, max_tokens=4))
    for _ in range(4):
        harness.step()
    assert harness.running == ["E", "L"]
    assert harness.scheduler.num_preemptions == 0
    harness.run()
    check_outputs(harness)


def test_who_gave_way_often_enough_stays() -> None:
    harness = Harness(make_limits(max_num_seqs=1))
    harness.add(make_request("L", num_prompt=4, max_tokens=60, priority=1))
    for index in range(10):
        for _ in range(4):
            harness.step()
        harness.add(make_request(f"H{index}", max_tokens=2))
    harness.run()
    (sequence,) = harness.groups["L"].sequences
    assert sequence.num_evictions == sequence.num_preemptions == MOST_EVICTIONS
    check_outputs(harness)


def test_groups_and_beams_take_and_give_places_as_a_whole() -> None:
    harness = Harness(make_limits(max_num_seqs=4, num_blocks=60))
    harness.add(make_request("S", max_tokens=20, n=3, priority=2))
    harness.add(make_request("L", max_tokens=20, priority=1))
    for _ in range(4):
        harness.step()
    harness.add(make_request("B", max_tokens=6, beams=Beams(3), priority=0))
    for _ in range(5):
        harness.step()
    assert harness.running == ["B", "L"]
    harness.add(make_request("U", max_tokens=6, n=2, priority=-1))
    for _ in range(8):
        harness.step()
    assert harness.running[0] == "U"
    harness.run()
    assert harness.groups["L"].sequences[0].num_evictions <= 1
    check_outputs(harness)


def test_what_the_cache_has_elsewhere_need_not_be_computed_again() -> None:
    """B's blocks, computed with the same tokens as A's that are cached, cost nothing to lose: no swap for them."""
    harness = Harness(make_limits(num_blocks=30, num_host_blocks=30, swaps=True))
    harness.add(make_request("A", num_prompt=17, max_tokens=1, cache_salt="same"))
    harness.run()
    group = harness.add(make_request("B", num_prompt=17, max_tokens=20, cache_salt="other"))
    for _ in range(2):
        harness.step()
    (sequence,) = group.sequences
    assert preemption._num_lost_blocks(harness.scheduler.batch, [sequence]) == len(sequence.block_table)
    sequence.block_hashes = list(harness.groups["A"].sequences[0].block_hashes)
    assert preemption._num_lost_blocks(harness.scheduler.batch, [sequence]) == len(sequence.block_table) - 4
