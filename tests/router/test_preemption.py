"""Who gives up blocks, and by which way. "out 2->h0" moves a block to the host, "in h0->3" one back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo_router.request import Beams
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
