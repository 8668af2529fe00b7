"""Who killed the worker: the culprit fails behind few deaths, and nobody else ever does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo_router.scheduler import Scheduler
from tests.router.fake_worker import expected_output
from tests.router.harness import EOS, Harness, make_limits, make_request


def run_with_killers(harness: Harness, kills: Callable[[str, int], bool], most_deaths: int) -> int:
    """Runs until all have ended. kills: whether the worker dies of sampling a request's token behind so many. Returns
    how often it died."""
    num_deaths = 0
    for _ in range(2000):
        while harness.send() is not None:
            pass
        if not harness.in_flight:
            assert harness.scheduler.num_requests == 0
            return num_deaths
        plan = harness.in_flight[0]
        sampled = [key for key, samples in zip(plan.sequence_ids, plan.samples, strict=True) if samples]
        if any(kills(harness._name(key), len(harness.output(harness._name(key)))) for key in sampled):
            num_deaths += 1
            assert num_deaths <= most_deaths
            harness.disconnect()
            harness.connect()
        else:
            harness.answer()
    raise AssertionError("it does not end")


def check_others(harness: Harness, *killers: str) -> None:
    for request_id, group in harness.groups.items():
        if request_id in killers:
            message = harness.failure(request_id)
            assert message is not None
            assert message.startswith("the worker was lost")
            assert message.endswith("with no other beside it; it is not tried again")
        else:
            assert harness.failure(request_id) is None
            assert harness.output(request_id) == expected_output(group.request)[0]
            assert harness.delivered(request_id) == harness.output(request_id)


def test_a_request_alone_that_kills_the_worker_fails_with_the_third_death() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("K"))
    assert run_with_killers(harness, lambda name, num_output: name == "K", 3) == 3
    check_others(harness, "K")
    assert harness.failure("K") == (
        "the worker was lost 3 times while it computed this request, 3 times with no other beside it; "
        "it is not tried again"
    )
    harness.add(make_request("A"))
    harness.run()


@pytest.mark.parametrize("killing_output", [0, 1, 5])
@pytest.mark.parametrize("position", range(6))
def test_among_others_the_killer_fails_and_they_finish(position: int, killing_output: int) -> None:
    harness = Harness(make_limits())
    names = [f"R{index}" for index in range(5)]
    names.insert(position, "K")
    for name in names:
        harness.add(make_request(name, num_prompt=3 + len(harness.groups), max_tokens=12))
    num_deaths = run_with_killers(harness, lambda name, num: name == "K" and num == killing_output, 5)
    assert num_deaths in (4, 5)
    check_others(harness, "K")


def test_a_killer_that_arrives_while_others_run_and_wait() -> None:
    harness = Harness(make_limits(max_num_seqs=4, num_blocks=30))
    for index in range(10):
        harness.add(make_request(f"R{index}", num_prompt=10, max_tokens=15))
    for _ in range(8):
        harness.step()
    harness.add(make_request("K", num_prompt=30, max_tokens=15, priority=-1))
    assert run_with_killers(harness, lambda name, num: name == "K" and num == 3, 5) <= 5
    check_others(harness, "K")


def test_two_killers_are_both_found() -> None:
    harness = Harness(make_limits())
    for name in ("R0", "K0", "R1", "K1", "R2"):
        harness.add(make_request(name, max_tokens=12))
    assert run_with_killers(harness, lambda name, num: name[0] == "K" and num == 2, 10) <= 10
    check_others(harness, "K0", "K1")


def test_an_ordinary_killer_of_samples_takes_its_whole_request() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("R", max_tokens=9))
    group = harness.add(make_request("K", max_tokens=9, n=3))
    ids = {sequence.sequence_id for sequence in group.sequences}
    num_deaths = 0
    while harness.scheduler.num_requests:
        while harness.send() is not None:
            pass
        if (
            group.num_unfinished
            and len(group.sequences[1].output_token_ids) == 4
            and ids & set(harness.in_flight[0].sequence_ids)
        ):
            num_deaths += 1
            harness.disconnect()
            harness.connect()
        elif harness.in_flight:
            harness.answer()
    assert num_deaths <= 5
    assert harness.failure("K") is not None
    assert harness.output("R") == expected_output(harness.groups["R"].request)[0]


@pytest.mark.parametrize("gap", range(1, 12))
def test_a_worker_that_is_killed_from_outside_blames_nobody(gap: int) -> None:
    """Three times, so many answers apart, with everybody in flight."""
    harness = Harness(make_limits(max_num_seqs=32, num_blocks=300))
    for index in range(32):
        harness.add(make_request(f"R{index}", num_prompt=4 + index % 5, max_tokens=16, seed=index))
    harness.step()
    for _ in range(3):
        for _ in range(gap):
            harness.step()
        harness.send()
        harness.disconnect()
        harness.connect()
    harness.run()
    check_others(harness)


def test_at_once_killed_again_and_again_is_nobodys_fault_as_long_as_all_are_in_flight() -> None:
    harness = Harness(make_limits(max_num_seqs=32, num_blocks=300))
    for index in range(32):
        harness.add(make_request(f"R{index}"))
    for _ in range(3):
        while harness.send() is not None:
            pass
        harness.disconnect()
        harness.connect()
    assert len(harness.in_flight) == 0
    harness.run()
    check_others(harness)


def test_a_suspect_goes_on_alone_and_others_follow_when_it_is_cleared() -> None:
    harness = Harness(make_limits())
    for name in "ABC":
        harness.add(make_request(name, max_tokens=12))
    for _ in range(2):
        harness.send()
        assert harness.running == ["A", "B", "C"]
        harness.disconnect()
        harness.connect()
    harness.send()
    assert harness.running == ["C"]
    harness.add(make_request("D"))
    harness.send()
    assert harness.running == ["C"]
    harness.answer()
    harness.send()
    assert harness.running == ["B", "C"]
    for _ in range(6):
        harness.step()
    assert harness.running == ["A", "B", "C", "D"]
    harness.run()
    check_others(harness)


def test_a_suspect_that_leaves_clears_the_way() -> None:
    harness = Harness(make_limits())
    for name in "ABC":
        harness.add(make_request(name))
    for _ in range(2):
        harness.send()
        harness.disconnect()
        harness.connect()
    harness.cancel("C")
    harness.cancel("B")
    harness.send()
    assert harness.running == ["A"]
    harness.run()


def test_who_gets_on_between_deaths_is_not_suspected() -> None:
    """A long request alone, and a worker that dies every third step: it gets on, so it goes on."""
    harness = Harness(make_limits())
    harness.add(make_request("A", max_tokens=40))
    num_deaths = 0
    while harness.scheduler.num_requests:
        for _ in range(4):
            harness.step()
        harness.send()
        if harness.in_flight:
            num_deaths += 1
        harness.disconnect()
        harness.connect()
    assert num_deaths > 5
    check_others(harness)


def test_a_limit_of_one_fails_with_the_first_death_alone() -> None:
    harness = Harness(make_limits())
    harness.scheduler = Scheduler(make_limits(), eos_token_ids=EOS, max_worker_failures=1)
    harness.connect()
    harness.add(make_request("K"))
    assert run_with_killers(harness, lambda name, num: True, 1) == 1
    check_others(harness, "K")


def test_deaths_with_nothing_in_flight_are_nobodys() -> None:
    harness = Harness(make_limits())
    harness.add(make_request("A", max_tokens=3))
    for _ in range(5):
        harness.disconnect()
        harness.connect()
    harness.run()
    check_others(harness)
