from __future__ import annotations

import pytest
from engine import ready_made_plans


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "max_tokens"), [((5,), 1, 512), ((5,), 4, 2), ((7, 3, 20), 6, 8), ((4,) * 9, 3, 10)]
)
def test_plans_compute_every_position_once_and_sample_behind_the_prompt(
    lengths: tuple[int, ...], num_tokens: int, max_tokens: int
) -> None:
    prompts = [list(range(length)) for length in lengths]
    computed: dict[int, int] = {}
    sampled = dict.fromkeys(range(1, len(lengths) + 1), 0)
    blocks: list[int] = []
    for plan in ready_made_plans(prompts, num_tokens, max_tokens=max_tokens, block_size=4):
        for new in plan.new_sequences:
            assert list(new.token_ids) == prompts[new.sequence_id - 1]
            assert new.prompt_token_count == len(new.token_ids)
            assert len(new.block_ids) * 4 >= len(new.token_ids) + num_tokens
            computed[new.sequence_id] = 0
            blocks += new.block_ids
        columns = plan.scheduled
        assert 0 < sum(columns.token_counts) <= max_tokens
        for sequence_id, start, count, samples in zip(
            columns.sequence_ids, columns.start_positions, columns.token_counts, columns.samples, strict=True
        ):
            assert start == computed[sequence_id]
            computed[sequence_id] += count
            sampled[sequence_id] += samples
            known = lengths[sequence_id - 1] + max(0, sampled[sequence_id] - samples)
            assert samples == (computed[sequence_id] == known)
    assert set(sampled.values()) == {num_tokens}
    assert len(set(blocks)) == len(blocks)
