"""The exposition: names, labels, and gauges that are read when they are scraped."""

from __future__ import annotations

from octavo_router.counts import Counts
from octavo_router.metrics import Gauges, Metrics


def test_every_counter_is_there_before_anything_happened() -> None:
    text = Metrics().render().decode()
    for reason in ("stop", "length", "abort", "deadline", "error"):
        assert f'octavo_requests_finished_total{{reason="{reason}"}} 0.0' in text
    for reason in ("invalid", "unsupported", "too_long", "too_large", "overloaded", "unavailable", "abort", "error"):
        assert f'octavo_requests_refused_total{{reason="{reason}"}} 0.0' in text
    for name in ("requests_accepted", "prompt_tokens", "generation_tokens", "sessions_lost", "prefix_cache_queries"):
        assert f"\noctavo_{name}_total 0.0" in text
    for kind in ("swap", "recompute"):
        assert f'octavo_preemptions_total{{kind="{kind}"}} 0.0' in text
    assert "octavo_kv_usage_ratio 0.0" in text


def test_gauges_are_read_at_scrape_time() -> None:
    metrics = Metrics()
    gauges = Gauges(
        num_waiting=3,
        num_running=2,
        num_used_blocks=5,
        num_cached_blocks=4,
        num_blocks=20,
        num_host_blocks=30,
        num_used_host_blocks=6,
        num_cached_host_blocks=8,
        counts=Counts(
            num_prefix_query_tokens=100,
            num_prefix_hit_tokens=60,
            num_prefix_hit_host_tokens=20,
            num_evictions=9,
            num_demotions=3,
            num_swapped_out_blocks=12,
            num_swapped_in_blocks=11,
            num_copied_blocks=2,
            num_recompute_preemptions=7,
            num_swap_preemptions=1,
        ),
    )
    metrics.watch(lambda: gauges)
    text = metrics.render().decode()
    assert "octavo_sequences_waiting 3.0" in text
    assert 'octavo_kv_blocks_used{tier="device"} 5.0' in text
    assert 'octavo_kv_blocks_total{tier="device"} 20.0' in text
    assert "octavo_kv_usage_ratio 0.25" in text
    for line in (
        'octavo_kv_blocks_cached{tier="device"} 4.0',
        'octavo_kv_blocks_total{tier="host"} 30.0',
        'octavo_kv_blocks_used{tier="host"} 6.0',
        'octavo_kv_blocks_cached{tier="host"} 8.0',
        "octavo_prefix_cache_queries_total 100.0",
        'octavo_prefix_cache_hits_total{tier="device"} 40.0',
        'octavo_prefix_cache_hits_total{tier="host"} 20.0',
        "octavo_prefix_cache_evictions_total 9.0",
        "octavo_prefix_cache_demotions_total 3.0",
        'octavo_kv_blocks_swapped_total{direction="out"} 12.0',
        'octavo_kv_blocks_swapped_total{direction="in"} 11.0',
        "octavo_kv_blocks_copied_total 2.0",
        'octavo_preemptions_total{kind="recompute"} 7.0',
        'octavo_preemptions_total{kind="swap"} 1.0',
    ):
        assert f"\n{line}\n" in text, line
    gauges = Gauges()
    assert "octavo_sequences_waiting 0.0" in metrics.render().decode()


def test_histograms() -> None:
    metrics = Metrics()
    metrics.first_token(0.3)
    metrics.sample_finished(1.0, 11)
    metrics.sample_finished(0.0, 1)
    metrics.request_finished("length", 2.0)
    metrics.request_finished("abort", 2.0)
    metrics.step(num_tokens=9, duration_s=0.25, idle_s=0.5, is_between=False)
    metrics.step(num_tokens=1, duration_s=0.25, idle_s=0.125, is_between=True)
    value = metrics.registry.get_sample_value
    assert value("octavo_time_to_first_token_seconds_bucket", {"le": "0.5"}) == 1
    assert value("octavo_time_to_first_token_seconds_bucket", {"le": "0.2"}) == 0
    assert value("octavo_time_per_output_token_seconds_sum") == 0.1
    assert value("octavo_time_per_output_token_seconds_count") == 1
    assert value("octavo_request_latency_seconds_count") == 1
    assert value("octavo_requests_finished_total", {"reason": "abort"}) == 1
    assert value("octavo_step_duration_seconds_sum") == 0.5
    assert value("octavo_worker_idle_seconds_total") == 0.625
    assert value("octavo_worker_gap_seconds_total") == 0.125
    metrics.turnaround(0.0004)
    assert value("octavo_plan_turnaround_seconds_bucket", {"le": "0.0005"}) == 1
    assert value("octavo_plan_turnaround_seconds_bucket", {"le": "0.0003"}) == 0


def test_two_routers_in_one_process_do_not_share() -> None:
    first, second = Metrics(), Metrics()
    first.tokens(5)
    assert second.registry.get_sample_value("octavo_generation_tokens_total") == 0
