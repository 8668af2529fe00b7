from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, BackendUnavailableError, load_backend
from octavo_worker.executor import Executor
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.prompt_logprobs import SLICE_ROWS, score_prompts, scored_rows
from octavo_worker.sequences import SequenceTable
from tests.worker.checkpoints import tiny_config, write_checkpoint
from tests.worker.conftest import load_decoder, make_executor, new_sequence, schedule

LONG = [(5 * index * index + index + 2) % 96 for index in range(100)]
BLOCKS = list(range(13))
ASKED = {"return_prompt_logprobs": True, "top_prompt_logprob_count": 2}

Score = tuple[float, tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """A tiny llama over kernels that give a row the same bits whatever rows stand beside it."""
    try:
        backend = load_backend("cpu")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config())
    return make_executor(load_decoder(open_checkpoint(find_model(str(folder))), backend), backend)


@pytest.fixture(autouse=True)
def _forget(executor: Executor) -> None:
    executor.reset()


def scores_of(result: pb.StepResult, sequence_id: int = 1) -> dict[int, Score]:
    """Position to log-probability and the likeliest tokens with theirs."""
    found: dict[int, Score] = {}
    for stretch in result.prompt_logprobs:
        if stretch.sequence_id == sequence_id:
            columns, begin = stretch.columns, 0
            for offset, (logprob, count) in enumerate(zip(columns.logprobs, columns.top_counts, strict=True)):
                end = begin + count
                top = tuple(columns.top_token_ids[begin:end]), tuple(columns.top_logprobs[begin:end])
                found[stretch.start_position + offset] = (logprob, *top)
                begin = end
            assert begin == len(columns.top_token_ids) == len(columns.top_logprobs)
    return found


def compute(executor: Executor, sequence: pb.NewSequence, *chunks: int, samples: bool = False) -> dict[int, Score]:
    """The scores that come when the sequence is computed in these chunks."""
    found: dict[int, Score] = {}
    plan, start = pb.StepPlan(new_sequences=[sequence]), 0
    for count in chunks:
        is_last = start + count == len(sequence.token_ids)
        plan.scheduled.CopyFrom(schedule((sequence.sequence_id, start, count, samples and is_last)))
        result = executor.execute(plan)
        assert not result.errors
        found |= scores_of(result, sequence.sequence_id)
        plan, start = pb.StepPlan(), start + count
    executor.execute(pb.StepPlan(release_sequence_ids=[sequence.sequence_id]))
    return found


def test_scores_are_the_models_own_distribution(executor: Executor) -> None:
    prompt = LONG[:12]
    found = compute(executor, new_sequence(1, prompt, BLOCKS, **ASKED), 12)
    assert list(found) == list(range(1, 12))
    for position, (logprob, top_ids, top_logprobs) in found.items():
        sampled = new_sequence(2, prompt[:position], BLOCKS[:4], return_logprobs=True, top_logprob_count=96)
        plan = pb.StepPlan(new_sequences=[sampled], scheduled=schedule((2, 0, position, True)))
        executor.execute(pb.StepPlan(release_sequence_ids=[2]))
        result = executor.execute(plan)
        by_id = dict(zip(result.logprobs.top_token_ids, result.logprobs.top_logprobs, strict=True))
        assert logprob == by_id[prompt[position]]
        assert (top_ids, top_logprobs) == (tuple(by_id)[:2], tuple(by_id.values())[:2])


@pytest.mark.parametrize("chunks", [(16, 33, 51), (1, 98, 1), (64, 36), (1, 1, 1, 97)])
def test_chunks_lose_nothing_and_change_no_bit(executor: Executor, chunks: tuple[int, ...]) -> None:
    whole = compute(executor, new_sequence(1, LONG, BLOCKS, **ASKED), 100, samples=True)
    assert list(whole) == list(range(1, 100))
    assert compute(executor, new_sequence(2, LONG, BLOCKS[::-1], **ASKED), *chunks) == whole


def test_sequences_share_slices_and_only_those_that_ask_are_scored(executor: Executor) -> None:
    alone = compute(executor, new_sequence(1, LONG[:40], BLOCKS, **ASKED), 40)
    sequences = [
        new_sequence(1, LONG[:40], [0, 1, 2, 3, 4], **ASKED),
        new_sequence(2, LONG[:40], [5, 6, 7, 8, 9]),
        new_sequence(3, LONG[:40], [10, 11, 12, 13, 14], return_prompt_logprobs=True),
        new_sequence(4, [7], [15], **ASKED),
    ]
    scheduled = schedule((4, 0, 1, True), (3, 0, 40, True), (2, 0, 40, True), (1, 0, 40, True))
    result = executor.execute(pb.StepPlan(new_sequences=sequences, scheduled=scheduled))
    assert list(result.sequence_ids) == [4, 3, 2, 1]
    assert [stretch.sequence_id for stretch in result.prompt_logprobs] == [3, 1]
    assert scores_of(result, 1) == alone
    assert scores_of(result, 3) == {position: (logprob, (), ()) for position, (logprob, _, _) in alone.items()}


def test_output_is_not_scored(executor: Executor) -> None:
    """A sequence that is computed anew has its output behind the prompt."""
    replayed = new_sequence(1, LONG[:20], BLOCKS, prompt_len=12, **ASKED)
    assert list(compute(executor, replayed, 20, samples=True)) == list(range(1, 12))
    replayed.sequence_id = 2
    assert list(compute(executor, replayed, 5, 10, 5)) == list(range(1, 12))


def test_a_start_behind_cached_tokens_scores_what_is_computed(executor: Executor) -> None:
    whole = compute(executor, new_sequence(1, LONG, BLOCKS, **ASKED), 100)
    executor.execute(pb.StepPlan(new_sequences=[new_sequence(2, LONG, BLOCKS)], scheduled=schedule((2, 0, 100, False))))
    plan = pb.StepPlan(new_sequences=[new_sequence(3, LONG, BLOCKS, **ASKED)], scheduled=schedule((3, 48, 52, True)))
    assert scores_of(executor.execute(plan), 3) == {p: score for p, score in whole.items() if p > 48}


def test_logits_that_are_not_finite_fail_their_sequence_alone(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Tensor] = executor.decoder.hidden

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        hidden = real(*args, **kwargs)
        hidden[3] = math.nan  # a token of the first sequence, not its last
        return hidden

    monkeypatch.setattr(executor.decoder, "hidden", broken)
    sequences = [new_sequence(1, LONG[:9], [0, 1], **ASKED), new_sequence(2, LONG[:9], [2, 3], **ASKED)]
    scheduled = schedule((1, 0, 9, True), (2, 0, 9, True))
    result = executor.execute(pb.StepPlan(new_sequences=sequences, scheduled=scheduled))
    assert [(error.sequence_id, error.code) for error in result.errors] == [(1, pb.SEQUENCE_ERROR_CODE_NUMERIC)]
    assert list(result.sequence_ids) == [2]
    assert [stretch.sequence_id for stretch in result.prompt_logprobs] == [2]
    assert not executor.execute(pb.StepPlan(scheduled=schedule((1, 9, 1, True)))).errors


def test_a_token_without_a_row_in_the_head_has_no_probability(
    backend: Backend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows of the embedding beyond the tokenizer's size are padding, but a prompt may name them."""
    folder = write_checkpoint(tmp_path_factory.mktemp("padded"), tiny_config(vocab_size=128))
    decoder = load_decoder(open_checkpoint(find_model(str(folder))), backend)
    assert decoder.num_sampled == 96
    found = compute(make_executor(decoder, backend), new_sequence(1, [5, 127, 95], [0], **ASKED), 3)
    assert found[1][0] == -math.inf
    assert math.isfinite(found[2][0])
    assert all(token_id < 96 for _, top_ids, _ in found.values() for token_id in top_ids)


def test_logits_are_made_for_few_rows_at_a_time() -> None:
    table = SequenceTable(1)
    num_tokens = 3 * SLICE_ROWS + 5
    params = pb.SequenceParams(return_prompt_logprobs=True)
    row = np.array([table.put(1, np.zeros(num_tokens, np.int32), np.zeros(0, np.int32), num_tokens, params)])
    scored = scored_rows(table, row, np.array([0]), np.array([num_tokens]))
    assert scored is not None
    sizes, progress = [], []

    def logits_of(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return torch.zeros(len(rows), 8)

    found, broken = score_prompts(scored, logits_of, torch.device("cpu"), lambda: progress.append(1))
    assert (sizes, len(progress)) == ([SLICE_ROWS] * 3 + [4], 4)
    assert found[0].columns.logprobs == pytest.approx([-math.log(8)] * (num_tokens - 1))
    assert not broken


def test_nothing_is_looked_at_where_nobody_asked(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_worker.executor.score_prompts", None)
    assert compute(executor, new_sequence(1, LONG, BLOCKS, top_prompt_logprob_count=3), 100) == {}
