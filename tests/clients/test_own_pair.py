from __future__ import annotations

from octavo import SamplingParams
from octavo.config import RouterConfig
from octavo.own_pair import RequestSeeds, concurrency_of


def test_a_seed_gives_each_request_its_own_and_the_same_again() -> None:
    # SplitMix64 from state 1: its first three outputs, of which the second is skipped for the request's own seed.
    for _ in range(2):
        seeds = RequestSeeds(1)
        drawn = [seeds.seeded(params).seed for params in (SamplingParams(), SamplingParams(seed=5), SamplingParams())]
        assert drawn == [10451216379200822465, 5, 17911839290282890590]


def test_without_a_seed_the_router_draws() -> None:
    assert RequestSeeds(None).seeded(SamplingParams()).seed is None


def test_more_than_a_batch_is_kept_under_way_but_no_more_than_may_wait() -> None:
    assert concurrency_of(RouterConfig(max_num_seqs=8)) == 16
    assert concurrency_of(RouterConfig(max_num_seqs=8, max_waiting_requests=10)) == 10
    assert concurrency_of(RouterConfig(max_num_seqs=8, max_waiting_requests=0)) == 16
