"""The simulator over a fixed set of seeds, and what it promises of itself: the same run for the same seed, and a way to
replay one alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from octavo_router.block_pool import BlockPool
from octavo_router.scheduler import Scheduler
from tests.simulator import run
from tests.simulator.oracle import VOCAB_SIZE, candidates, digests
from tests.simulator.run import Task, simulate, simulate_all
from tests.simulator.scenario import STEPS, Features, draw_scenario
from tests.simulator.trace import traced_requests
from tests.simulator.world import World

NUM_SEEDS = 200
REPOSITORY = Path(__file__).resolve().parents[2]

HAPPENS = (
    "beam searches",
    "blamed",
    "copied blocks",
    "demotions",
    "evictions",
    "failed",
    "flushes",
    "killed workers",
    "left",
    "lost sessions",
    "misplaced results",
    "prefix hit host tokens",
    "prefix hit tokens",
    "priority preemptions",
    "recompute preemptions",
    "refused",
    "resumed",
    "slow phases",
    "stop strings",
    "swap preemptions",
    "swapped in blocks",
    "swapped out blocks",
    "too large",
    "void results",
)
"""What the fixed seeds have to bring about, or they test less than they say."""


@pytest.mark.timeout(900)
def test_two_hundred_seeds() -> None:
    counts: Counter[str] = Counter()
    failed = []
    for outcome in simulate_all([Task(seed) for seed in range(NUM_SEEDS)], os.cpu_count() or 1):
        counts.update(outcome.counts)
        if outcome.error is not None:
            failed.append(f"seed {outcome.seed}: {outcome.error}")
        else:
            assert outcome.counts["steps"] >= STEPS
    assert not failed, "\n\n".join(failed)
    assert [name for name in HAPPENS if not counts[name]] == []
    assert counts["accepted"] > 10_000


def test_pools_are_small_and_large() -> None:
    sizes = [draw_scenario(seed).limits.num_device_blocks for seed in range(NUM_SEEDS)]
    assert min(sizes) == 4
    assert 350 < max(sizes) <= 400


def test_a_seed_runs_the_same_way_every_time() -> None:
    worlds = [World(draw_scenario(42, num_steps=100)) for _ in range(2)]
    first, second = (world.run() for world in worlds)
    assert first == second
    assert worlds[0].lines == worlds[1].lines


def test_another_seed_is_another_run() -> None:
    assert draw_scenario(1).describe() != draw_scenario(2).describe()


def test_features_change_no_other_setting() -> None:
    plain = draw_scenario(7, features=Features(beams=False, host_tier=False))
    assert plain.traffic.share_beams == 0
    assert plain.limits.num_host_blocks == 0
    assert plain.traffic.mean_gap_s == draw_scenario(7).traffic.mean_gap_s
    assert plain.worker == draw_scenario(7).worker


def test_what_is_left_out_does_not_happen() -> None:
    features = Features(prefix_caching=False, host_tier=False, samples=False, beams=False, resume=False)
    counts: Counter[str] = Counter()
    for seed in range(5):
        outcome = simulate(Task(seed, num_steps=100, features=features))
        assert outcome.error is None, outcome.error
        counts.update(outcome.counts)
    for name in ("prefix hit tokens", "demotions", "swap preemptions", "copied blocks", "beam searches", "resumed"):
        assert counts[name] == 0, name


def test_a_failing_seed_is_shown_with_the_way_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leak(pool: BlockPool, table: list[int]) -> None:
        del table[1:]

    monkeypatch.setattr(BlockPool, "release", leak)
    monkeypatch.setattr(run, "simulate_all", lambda tasks, jobs: (simulate(task) for task in tasks))
    assert run.main(["--seeds", "9000:9004", "--steps", "50", "--max-failures", "1", "--without", "beams"]) == 1
    output = capsys.readouterr().out
    assert "seed 9000 failed" in output
    assert "limits: block_size=" in output
    assert "the last things that happened:" in output
    assert (
        "replay it alone: python -m tests.simulator.run --seeds 9000:9001 --trace --steps 50 --without beams" in output
    )
    assert run.main(["--seeds", "9000:9001", "--trace", "--steps", "50", "--without", "beams"]) == 1
    assert "Error: " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("text", ["x", "3:", ":", "1:2:3", "0", "5:5"])
def test_seeds_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--seeds", text])
    assert "seeds" in capsys.readouterr().err


def test_an_interrupt_ends_it_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.simulator.run", "--seeds", "1000000", "--jobs", "2", "--steps", "20"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert " of 1000000 seeds" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == run.INTERRUPTED
    assert "interrupted: " in errors
    assert "Traceback" not in errors


def test_the_trace_is_the_trace() -> None:
    rows = traced_requests()
    assert len(rows) == 256
    assert rows[0] == (396, 109, 4315)
    assert max(row.num_context_tokens for row in rows) > 4000
    assert max(row.num_generated_tokens for row in rows) > 400


def test_candidates_are_different_tokens_likeliest_first() -> None:
    for digest in digests(range(100)):
        found = candidates(digest, 12, suppressed=(3, 4))
        tokens, values = [token_id for token_id, _ in found], [value for _, value in found]
        assert len(set(tokens) - {3, 4}) == 12
        assert all(0 <= token_id < VOCAB_SIZE for token_id in tokens)
        assert values == sorted(values, reverse=True)
        assert values[0] < 0


def test_a_scheduler_that_does_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "plan", lambda scheduler, now: None)
    outcome = simulate(Task(0, num_steps=5))
    assert outcome.error is not None
    assert "nothing is planned, though 1 requests wait" in outcome.error
