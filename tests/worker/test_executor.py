from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, load_backend
from octavo_worker.executor import Executor, PlanError
from octavo_worker.grammar import GrammarEngine
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from tests.worker.checkpoints import ids_to_letters, letters_to_ids
from tests.worker.conftest import generate, load_decoder, make_executor, new_sequence, schedule

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


def prefill(executor: Executor, *sequences: pb.NewSequence) -> pb.StepResult:
    """Computes whole prompts and samples a token behind each."""
    entries = [(item.sequence_id, 0, len(item.token_ids), True) for item in sequences]
    return executor.execute(pb.StepPlan(new_sequences=sequences, scheduled=schedule(*entries)))


def messages(result: pb.StepResult) -> dict[int, str]:
    return {error.sequence_id: error.message for error in result.errors}


def test_chunks_batches_and_lookahead_give_the_same_tokens(executor: Executor) -> None:
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1, 2, 3]), 12)
    assert generate(executor, new_sequence(2, PROMPT, [9, 8, 7, 6]), 12, chunk=3) == expected
    other = generate(executor, new_sequence(3, [7, 8], [4, 5, 10]), 6)
    mixed = prefill(executor, new_sequence(4, PROMPT, [20, 21, 22]), new_sequence(5, [7, 8], [30, 31]))
    tokens: dict[int, list[int]] = {4: [], 5: []}
    for step in range(6):
        for sequence_id, token in zip(mixed.sequence_ids, mixed.token_ids, strict=True):
            tokens[sequence_id].append(token)
        mixed = executor.execute(pb.StepPlan(scheduled=schedule((5, 2 + step, 1, True), (4, 10 + step, 1, True))))
        assert list(mixed.sequence_ids) == [5, 4]
    assert tokens[4] == expected[:6]
    assert tokens[5] == other


def test_greedy_rows_are_the_same_with_logits_and_without(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that is drawn, all logits are written; where none is, none are."""
    asked: list[str] = []
    for name in ("logits", "greedy"):
        method = getattr(executor.decoder, name)
        monkeypatch.setattr(executor.decoder, name, lambda *args, m=method, n=name: (asked.append(n), m(*args))[1])
    with_logits = prefill(
        executor,
        new_sequence(1, PROMPT, [0, 1]),
        new_sequence(2, PROMPT[:5], [2, 3], temperature=0.9, seed=4),
        new_sequence(3, PROMPT[3:], [4, 5]),
    )
    without = prefill(executor, new_sequence(4, PROMPT, [10, 11]), new_sequence(5, PROMPT[3:], [12, 13]))
    assert asked == ["logits", "greedy"]
    assert list(without.token_ids) == [with_logits.token_ids[0], with_logits.token_ids[2]]
    cold = prefill(executor, new_sequence(6, PROMPT, [20, 21], temperature=1e-12))
    assert (asked[2:], list(cold.token_ids)) == (["greedy"], [with_logits.token_ids[0]])


def test_replay_behind_given_output_goes_on_with_the_same_tokens(executor: Executor) -> None:
    sampling = {"temperature": 0.9, "seed": 123, "top_p": 0.95}
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1, 2, 3], **sampling), 10)
    replayed = new_sequence(2, PROMPT + expected[:4], [5, 6, 7, 8], prompt_len=len(PROMPT), **sampling)
    assert generate(executor, replayed, 6, chunk=5) == expected[4:]


def test_seeded_samples_differ_and_repeat(executor: Executor) -> None:
    def sampled(seed: int) -> list[int]:
        return generate(executor, new_sequence(1, PROMPT, [0, 1, 2, 3], temperature=2.0, seed=seed), 8)

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(5)}) == 5


def test_pieces_of_tokens_are_joined_in_front(executor: Executor) -> None:
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1]), 3)
    executor.add_tokens(2, PROMPT[:4])
    executor.add_tokens(2, PROMPT[4:7])
    sequence = new_sequence(2, PROMPT[7:], [4, 5], prompt_len=len(PROMPT))
    result = executor.execute(pb.StepPlan(new_sequences=[sequence], scheduled=schedule((2, 0, 10, True))))
    assert result.token_ids == expected[:1]


def test_blocks_are_appended_before_the_step(executor: Executor) -> None:
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1, 2, 3]), 9)
    tokens = list(prefill(executor, new_sequence(2, PROMPT, [11, 5])).token_ids)
    while len(tokens) < 9:
        position = len(PROMPT) + len(tokens) - 1
        blocks = {2: [40 + position // 8]} if position % 8 == 0 else {}
        tokens += executor.execute(pb.StepPlan(scheduled=schedule((2, position, 1, True), new_blocks=blocks))).token_ids
    assert tokens == expected


def test_order_release_swap_out_swap_in_copy_fork_forward(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill(executor, new_sequence(1, PROMPT, [0, 1]), new_sequence(2, PROMPT, [2, 3]))
    calls: list[str] = []

    def spy(owner: object, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (calls.append(name), real(*args, **kwargs))[1])

    for owner, names in (
        (executor.table, ("remove", "fork")),
        (executor.pool, ("swap_out", "swap_in", "copy")),
        (executor.decoder, ("hidden",)),
    ):
        for name in names:
            spy(owner, name)
    result = executor.execute(
        pb.StepPlan(
            release_sequence_ids=[2],
            swap_out=pb.BlockMoves(source_block_ids=[0], target_block_ids=[0]),
            swap_in=pb.BlockMoves(source_block_ids=[0], target_block_ids=[5]),
            copies=pb.BlockMoves(source_block_ids=[1], target_block_ids=[6]),
            forks=pb.Forks(
                parent_sequence_ids=[1], child_sequence_ids=[3], token_ids=[9], block_counts=[2], block_ids=[5, 6],
                token_counts=[10],
            ),
            scheduled=schedule((3, 10, 1, True)),
        )
    )  # fmt: skip
    assert calls == ["remove", "swap_out", "swap_in", "copy", "fork", "hidden"]
    assert list(result.sequence_ids) == [3]
    assert result.moved_byte_count == 2 * executor.pool.layout.bytes_per_block


def test_swapped_sequence_goes_on_with_the_same_tokens(executor: Executor) -> None:
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1, 2]), 6)
    tokens = list(prefill(executor, new_sequence(2, PROMPT, [10, 11])).token_ids)
    executor.execute(
        pb.StepPlan(
            swap_out=pb.BlockMoves(source_block_ids=[10, 11], target_block_ids=[7, 2]), release_sequence_ids=[2]
        )
    )
    executor.pool.device[10:12] = 9.0
    again = new_sequence(2, PROMPT + tokens, [30, 31], prompt_len=len(PROMPT))
    moves = pb.BlockMoves(source_block_ids=[7, 2], target_block_ids=[30, 31])
    result = executor.execute(pb.StepPlan(new_sequences=[again], swap_in=moves, scheduled=schedule((2, 10, 1, True))))
    assert list(result.token_ids) == expected[1:2]


def test_fork_shares_and_replaces(executor: Executor) -> None:
    prefill(executor, new_sequence(1, PROMPT, [0, 1]), new_sequence(2, PROMPT[:5], [2]))
    forks = pb.Forks(
        parent_sequence_ids=[1, 2], child_sequence_ids=[2, 1], token_ids=[50, 60], block_counts=[2, 1],
        block_ids=[0, 1, 2], token_counts=[10, 5],
    )  # fmt: skip
    result = executor.execute(pb.StepPlan(forks=forks, scheduled=schedule((2, 10, 1, True), (1, 5, 1, True))))
    assert not result.errors
    known = [generate(executor, new_sequence(9, tokens, [20, 21]), 1) for tokens in ([*PROMPT, 50], [*PROMPT[:5], 60])]
    assert [[token] for token in result.token_ids] == known


def test_bad_forks_fail_their_children_alone(executor: Executor) -> None:
    prefill(executor, new_sequence(1, PROMPT, [0, 1]), new_sequence(2, PROMPT, [2, 3]))
    forks = pb.Forks(
        parent_sequence_ids=[8, 1, 1, 1, 1, 1, 2],
        child_sequence_ids=[11, 12, 13, 14, 15, 16, 1],
        token_ids=[1, 1, 1, 1, 96, 1, 1],
        block_counts=[0, 2, 2, 2, 2, 2, 1],
        block_ids=[0, 1] * 4 + [0, 64] + [2],
        token_counts=[1, 10, 99, 9, 10, 10, 12],
    )
    ids = [11, 12, 13, 14, 15, 16, 1]
    result = executor.execute(pb.StepPlan(forks=forks, scheduled=schedule(*((item, 10, 1, True) for item in ids))))
    assert list(result.sequence_ids) == [12]  # though its parent is replaced by a child that fails
    assert messages(result) == {
        11: "the parent sequence 8 is not known",
        13: "99 tokens of sequence 1 are to be kept; it has 11, 10 of them its prompt",
        14: "9 tokens of sequence 1 are to be kept; it has 11, 10 of them its prompt",
        15: "token 96 is not in the vocabulary of 96",
        16: "block 64 does not exist; the device has 64 blocks",
        1: "12 tokens of sequence 2 are to be kept; it has 11, 10 of them its prompt",
    }
    later = executor.execute(pb.StepPlan(forks=fork_of(1, 17), scheduled=schedule((17, 10, 1, True))))
    assert messages(later) == {17: "the parent sequence 1 is not known"}
    again = executor.execute(pb.StepPlan(forks=fork_of(1, 1), scheduled=schedule((1, 10, 1, True))))
    assert not again.errors  # told before, and not released yet
    assert not again.sequence_ids


def fork_of(parent: int, child: int, token: int = 1, kept: int = 10, blocks: tuple[int, ...] = (0, 1)) -> pb.Forks:
    return pb.Forks(
        parent_sequence_ids=[parent], child_sequence_ids=[child], token_ids=[token], block_counts=[len(blocks)],
        block_ids=blocks, token_counts=[kept],
    )  # fmt: skip


def test_beam_gets_candidates_and_no_token(executor: Executor) -> None:
    asked = {"return_logprobs": True, "top_logprob_count": 6}
    top = prefill(executor, new_sequence(1, PROMPT, [0, 1], **asked)).logprobs
    result = prefill(
        executor,
        new_sequence(2, [5, 6], [2], **asked),
        new_sequence(3, PROMPT, [3, 4], candidate_count=6, **asked),
        new_sequence(4, [7], [5]),
        new_sequence(5, [7], [6], candidate_count=500),
    )
    assert list(result.sequence_ids) == [2, 4]
    assert len(result.token_ids) == 2
    assert len(result.logprobs.logprobs) == 1
    assert [item.sequence_id for item in result.candidates] == [3, 5]
    assert list(result.candidates[0].token_ids) == list(top.top_token_ids)
    assert list(result.candidates[0].logprobs) == pytest.approx(list(top.top_logprobs), abs=1e-5)
    assert sorted(result.candidates[1].token_ids) == list(range(96))
    assert sum(math.exp(logprob) for logprob in result.candidates[1].logprobs) == pytest.approx(1, abs=1e-5)
    assert executor.table.tokens.lengths[executor.table.rows[3]] == len(PROMPT)


def test_beams_fork_and_drop_every_step_with_their_parents_params(executor: Executor) -> None:
    """Two beams over own blocks, against prefills of their tokens."""
    banned = {"suppressed_token_ids": [4, 5], "min_token_count": 2, "candidate_count": 4}
    first = prefill(executor, new_sequence(1, PROMPT, [0, 1], **banned)).candidates[0]
    a, b = first.token_ids[:2]
    forks = pb.Forks(
        parent_sequence_ids=[1, 1], child_sequence_ids=[1, 2], token_ids=[a, b], block_counts=[2, 2],
        block_ids=[0, 1, 0, 2], token_counts=[10, 10],
    )  # fmt: skip
    copies = pb.BlockMoves(source_block_ids=[1], target_block_ids=[2])
    step = schedule((1, 10, 1, True), (2, 10, 1, True))
    second = executor.execute(pb.StepPlan(copies=copies, forks=forks, scheduled=step)).candidates
    c, d = second[1].token_ids[:2]  # both go on behind beam 2
    forks = pb.Forks(
        parent_sequence_ids=[2, 2], child_sequence_ids=[1, 2], token_ids=[c, d], block_counts=[2, 2],
        block_ids=[0, 3, 0, 2], token_counts=[11, 11],
    )  # fmt: skip
    copies = pb.BlockMoves(source_block_ids=[2], target_block_ids=[3])
    step = schedule((1, 11, 1, True), (2, 11, 1, True))
    third = executor.execute(pb.StepPlan(copies=copies, forks=forks, scheduled=step)).candidates
    for tokens, found in (([a], second[0]), ([b], second[1]), ([b, c], third[0]), ([b, d], third[1])):
        alone = new_sequence(9, PROMPT + tokens, [20, 21], prompt_len=len(PROMPT), **banned)
        expected = prefill(executor, alone).candidates[0]
        assert list(found.token_ids) == list(expected.token_ids)
        assert list(found.logprobs) == pytest.approx(list(expected.logprobs), abs=1e-5)
    assert not {4, 5} & {*first.token_ids, *second[0].token_ids, *second[1].token_ids}


def test_fork_of_a_parent_that_failed_before_ends_the_child_that_it_replaces(executor: Executor) -> None:
    executor.execute(pb.StepPlan(new_sequences=[new_sequence(1, [1, 96], [0])]))  # fails
    prefill(executor, new_sequence(2, PROMPT, [2, 3]))
    forks = pb.Forks(
        parent_sequence_ids=[1], child_sequence_ids=[2], token_ids=[9], block_counts=[2], block_ids=[0, 1],
        token_counts=[2],
    )  # fmt: skip
    result = executor.execute(pb.StepPlan(forks=forks, scheduled=schedule((2, 10, 1, True))))
    assert not result.sequence_ids
    assert [error.sequence_id for error in result.errors] == [2]
    assert 2 not in executor.table.rows


BAD_SEQUENCES = {
    "token beyond the vocabulary": (new_sequence(5, [1, 96], [9]), "token 96 at position 1"),
    "no tokens": (new_sequence(5, [], [9]), "prompt_token_count is 0 for 0 tokens"),
    "block out of range": (new_sequence(5, [1], [64]), "block 64 does not exist; the device has 64 blocks"),
    "params not offered": (new_sequence(5, [1], [9], grammar="x"), "params.grammar is not offered"),
}
BAD_SCHEDULES = {
    "unknown sequence": (schedule((6, 0, 1, True)), 6, "the sequence is not known"),
    "start beyond known tokens": (
        schedule((5, 11, 1, True)),
        5,
        "tokens 11 to 12 are to be computed, and 11 are known",
    ),
    "count of 0": (schedule((5, 10, 0, True)), 5, "no token is to be computed"),
    "sample in the middle": (schedule((5, 3, 2, True)), 5, "sampled behind 5 of 11 tokens"),
    "blocks that do not suffice": (schedule((5, 8, 3, False)), 5, "11 tokens do not fit into blocks for 8"),
    "new block out of range": (schedule((5, 10, 1, True), new_blocks={5: [99]}), 5, "block 99 does not exist"),
}


@pytest.mark.parametrize("name", BAD_SEQUENCES)
def test_bad_sequence_fails_alone(name: str, executor: Executor) -> None:
    bad, problem = BAD_SEQUENCES[name]
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1]), 2)
    result = prefill(executor, new_sequence(1, PROMPT, [0, 1]), bad)
    assert problem in messages(result)[5]
    assert [error.code for error in result.errors] == [pb.SEQUENCE_ERROR_CODE_INVALID]
    assert (list(result.sequence_ids), list(result.token_ids)) == ([1], expected[:1])
    later = executor.execute(pb.StepPlan(scheduled=schedule((5, 1, 1, True), (1, 10, 1, True))))
    assert not later.errors  # what was already planned for it is ignored
    assert list(later.token_ids) == expected[1:]
    executor.execute(pb.StepPlan(release_sequence_ids=[5]))
    assert messages(executor.execute(pb.StepPlan(scheduled=schedule((5, 0, 1, True))))) == {
        5: "the sequence is not known"
    }


@pytest.mark.parametrize("name", BAD_SCHEDULES)
def test_bad_schedule_fails_its_sequence_alone(name: str, executor: Executor) -> None:
    scheduled, failing, problem = BAD_SCHEDULES[name]
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1]), 2)
    prefill(executor, new_sequence(1, PROMPT, [0, 1]))
    executor.execute(
        pb.StepPlan(new_sequences=[new_sequence(5, [*PROMPT, 1], [9])], scheduled=schedule((5, 0, 8, False)))
    )
    scheduled.MergeFrom(schedule((1, 10, 1, True)))
    result = executor.execute(pb.StepPlan(scheduled=scheduled))
    assert problem in messages(result)[failing]
    assert (list(result.sequence_ids), list(result.token_ids)) == ([1], expected[1:])


def test_logits_that_are_not_finite_fail_their_sequence_alone(executor: Executor) -> None:
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1]), 2)
    prefill(executor, new_sequence(1, PROMPT, [0, 1]), new_sequence(2, PROMPT, [2, 3]))
    executor.pool.device[2] = float("nan")
    result = executor.execute(pb.StepPlan(scheduled=schedule((2, 10, 1, True), (1, 10, 1, True))))
    assert [(error.sequence_id, error.code) for error in result.errors] == [(2, pb.SEQUENCE_ERROR_CODE_NUMERIC)]
    assert (list(result.sequence_ids), list(result.token_ids)) == ([1], expected[1:])
    assert not executor.execute(pb.StepPlan(scheduled=schedule((2, 11, 1, True)))).errors


def columns(**changes: Any) -> pb.StepPlan:
    scheduled = schedule((1, 0, 1, True))
    for name, values in changes.items():
        scheduled.ClearField(name)
        getattr(scheduled, name).extend(values)
    return pb.StepPlan(scheduled=scheduled)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (columns(samples=[]), "scheduled.samples has 0 entries for 1 sequences"),
        (columns(new_block_counts=[2]), "scheduled.new_block_ids does not have as many entries"),
        (columns(token_counts=[513]), "computes 513 tokens; at most 512"),
        (pb.StepPlan(scheduled=schedule((1, 0, 1, True), (1, 1, 1, True))), "names a sequence twice"),
        (pb.StepPlan(copies=pb.BlockMoves(source_block_ids=[0])), "1 sources and 0 targets"),
        (pb.StepPlan(copies=pb.BlockMoves(source_block_ids=[0, 1], target_block_ids=[1, 2])), "both source and target"),
        (pb.StepPlan(copies=pb.BlockMoves(source_block_ids=[0, 1], target_block_ids=[2, 2])), "one target twice"),
        (pb.StepPlan(swap_out=pb.BlockMoves(source_block_ids=[0], target_block_ids=[8])), "target block 8 of 8"),
        (pb.StepPlan(swap_in=pb.BlockMoves(source_block_ids=[8], target_block_ids=[0])), "source block 8 of 8"),
        (pb.StepPlan(forks=pb.Forks(child_sequence_ids=[1])), "forks.parent_sequence_ids has 0 entries for 1 children"),
        (pb.StepPlan(forks=pb.Forks(block_ids=[1])), "forks.block_ids does not have as many entries"),
        (
            pb.StepPlan(
                forks=pb.Forks(
                    parent_sequence_ids=[1, 1],
                    child_sequence_ids=[2, 2],
                    token_ids=[1, 1],
                    block_counts=[0, 0],
                    token_counts=[1, 1],
                )
            ),
            "forks.child_sequence_ids names a sequence twice",
        ),
    ],
)
def test_plans_that_make_no_sense(plan: pb.StepPlan, message: str, executor: Executor) -> None:
    with pytest.raises(PlanError, match=message):
        executor.execute(plan)


def test_suppressed_tokens_until_the_output_is_long_enough(executor: Executor) -> None:
    plain = generate(executor, new_sequence(1, PROMPT, [0, 1, 2]), 4)
    banned = sorted(set(plain))
    limited = new_sequence(2, PROMPT, [4, 5, 6], suppressed_token_ids=banned, min_token_count=2)
    tokens = generate(executor, limited, 4)
    assert not set(tokens[:2]) & set(banned)
    free = new_sequence(3, PROMPT + tokens[:2], [7, 8, 9])
    assert generate(executor, free, 2) == tokens[2:]


YES_NO = "start: /(yes|no)+/"


@pytest.fixture
def with_grammars(decoder: Decoder, backend: Backend, letters: GrammarEngine) -> Executor:
    return make_executor(decoder, backend, grammars=letters)


def test_grammar_holds_to_the_end_and_a_step_behind_it(with_grammars: Executor) -> None:
    """The last steps are those of lookahead, which is planned before an end of sequence is known."""
    for seed in range(8):
        sequence = new_sequence(1, PROMPT, [0, 1, 2, 3], grammar="start: /(yes|no){2}/", temperature=3.0, seed=seed)
        text = ids_to_letters(generate(with_grammars, sequence, 9))
        assert text.strip("$") in ("yesyes", "yesno", "noyes", "nono")
        assert text.endswith("$$$")


def test_sequence_whose_grammar_fails_fails_alone(with_grammars: Executor) -> None:
    plain = generate(with_grammars, new_sequence(1, PROMPT, [0, 1]), 2)
    grammars = ["start: nothing", YES_NO, 'start: "zz"', YES_NO]
    blocks = [[2 * row, 2 * row + 1] for row in range(1, 5)]
    constrained = [
        new_sequence(2, PROMPT, blocks[0], grammar=grammars[0]),
        new_sequence(3, PROMPT, blocks[1], grammar=grammars[1]),
        new_sequence(4, PROMPT, blocks[2], grammar=grammars[2], allowed_token_ids=letters_to_ids("ab")),
        new_sequence(5, PROMPT + letters_to_ids("yb"), blocks[3], grammar=grammars[3], prompt_len=len(PROMPT)),
    ]
    result = prefill(with_grammars, new_sequence(1, PROMPT, [0, 1]), *constrained)
    assert {error.code for error in result.errors} == {pb.SEQUENCE_ERROR_CODE_GRAMMAR}
    assert 'unknown name: "nothing"' in messages(result)[2]
    assert messages(result)[4] == "the grammar and the banned tokens leave no token to sample"
    assert "doesn't satisfy the grammar" in messages(result)[5]
    assert list(result.sequence_ids) == [1, 3]
    assert result.token_ids[0] == plain[0]
    later = with_grammars.execute(pb.StepPlan(scheduled=schedule(*((item, 10, 1, True) for item in (2, 4, 5, 3, 1)))))
    assert not later.errors
    assert list(later.sequence_ids) == [3, 1]
    assert ids_to_letters([result.token_ids[1], later.token_ids[0]]) in ("ye", "no")
    assert later.token_ids[1] == plain[1]


def test_logprobs_are_those_before_penalties_bias_and_bans(with_grammars: Executor) -> None:
    asked = {"return_logprobs": True, "top_logprob_count": 96}
    plain = prefill(with_grammars, new_sequence(1, PROMPT, [0, 1], **asked)).logprobs
    raw = dict(zip(plain.top_token_ids, plain.top_logprobs, strict=True))
    greedy = plain.top_token_ids[0]
    changes: list[dict[str, Any]] = [
        {"logit_bias_token_ids": [greedy], "logit_biases": [-100.0]},
        {"allowed_token_ids": [7, 9]},
        {"bad_word_token_ids": [greedy], "bad_word_lengths": [1]},
        {"grammar": YES_NO},
        {"logit_bias_token_ids": [50], "logit_biases": [100.0], "repetition_penalty": 1.2, "presence_penalty": 1.0},
    ]
    sequences = [new_sequence(2, PROMPT, [2, 3], **asked)]
    sequences += [
        new_sequence(3 + index, PROMPT, [4 + 2 * index, 5 + 2 * index], **asked, **change)
        for index, change in enumerate(changes)
    ]
    result = prefill(with_grammars, *sequences)
    assert not result.errors
    assert result.token_ids[0] == greedy
    assert greedy not in result.token_ids[1:]
    assert result.token_ids[5] == 50
    for index, token_id in enumerate(result.token_ids):
        assert result.logprobs.logprobs[index] == pytest.approx(raw[token_id], abs=1e-5)
        tops = result.logprobs.top_token_ids[96 * index : 96 * (index + 1)]
        assert list(tops) == list(plain.top_token_ids)


def test_replaced_and_forked_sequences_start_over_in_their_grammar(with_grammars: Executor) -> None:
    ordered = {"grammar": 'start: "abcdefgh"'}
    prefill(with_grammars, new_sequence(1, PROMPT, [0, 1, 2], **ordered))
    for count in (1, 2):
        with_grammars.execute(pb.StepPlan(scheduled=schedule((1, 9 + count, 1, True))))
    d, x = letters_to_ids("dx")
    # Behind "abc" a child goes on with "ab" and another token, and one with what the grammar takes.
    forks = pb.Forks(
        parent_sequence_ids=[1, 1], child_sequence_ids=[2, 1], token_ids=[x, d], block_counts=[3, 3],
        block_ids=[0, 1, 2, 0, 1, 3], token_counts=[12, 13],
    )  # fmt: skip
    result = with_grammars.execute(pb.StepPlan(forks=forks, scheduled=schedule((2, 12, 1, True), (1, 13, 1, True))))
    assert "doesn't satisfy the grammar" in messages(result)[2]
    assert ids_to_letters(result.token_ids) == "e"
    again = new_sequence(1, PROMPT + letters_to_ids("abcdef"), [4, 5, 6], prompt_len=len(PROMPT), **ordered)
    assert ids_to_letters(prefill(with_grammars, again).token_ids) == "g"


def test_logprobs_come_for_the_sequences_that_asked(executor: Executor) -> None:
    result = prefill(
        executor,
        new_sequence(1, PROMPT, [0, 1], return_logprobs=True, top_logprob_count=3),
        new_sequence(2, PROMPT, [2, 3]),
        new_sequence(3, [5, 6], [4], return_logprobs=True),
    )
    columns = result.logprobs
    assert len(result.token_ids) == 3
    assert list(columns.top_counts) == [3, 0]
    assert len(columns.logprobs) == 2
    assert columns.top_token_ids[0] == result.token_ids[0]
    assert columns.top_logprobs[0] == columns.logprobs[0]
    assert list(columns.top_logprobs) == sorted(columns.top_logprobs, reverse=True)


def test_plan_without_work_is_answered(executor: Executor) -> None:
    result = executor.execute(pb.StepPlan(release_sequence_ids=[1, 2]))
    assert (len(result.sequence_ids), len(result.errors), result.moved_byte_count) == (0, 0, 0)


def test_reset_forgets_everything(executor: Executor) -> None:
    prefill(executor, new_sequence(1, PROMPT, [0, 1]))
    executor.add_tokens(2, [1])
    executor.reset()
    assert messages(executor.execute(pb.StepPlan(scheduled=schedule((1, 10, 1, True))))) == {
        1: "the sequence is not known"
    }


def test_progress_is_told_within_a_step(decoder: Decoder, backend: Backend) -> None:
    calls: list[int] = []
    executor = make_executor(decoder, backend, on_progress=lambda: calls.append(1))
    prefill(executor, new_sequence(1, PROMPT, [0, 1]))
    assert len(calls) == 3  # before the pass, and after each of two layers


def test_default_model_knows_the_capital_of_france() -> None:
    checkpoint = open_checkpoint(find_model("SmolLM2-135M-Instruct"))
    backend = load_backend("auto")
    # Three first words are nearly as likely; 16 bits may change their order.
    executor = make_executor(load_decoder(checkpoint, backend, torch.float32), backend, block_size=16)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json.decode())
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = generate(executor, new_sequence(1, tokenizer.encode(prompt).ids, [3, 9, 1, 4]), 8)
    assert tokens[-1] == 2
    assert tokenizer.decode(tokens) == "The capital of France is Paris."


def test_tiny_references_of_transformers(tiny_models: dict[str, Path], backend: Backend) -> None:
    """Tokens, wherever the reference's margin is clear, and log-probabilities; each step behind the reference's own."""
    for folder in tiny_models.values():
        checkpoint = open_checkpoint(find_model(str(folder)))
        executor = make_executor(load_decoder(checkpoint, backend), backend, num_blocks=64, block_size=8)
        for entry in json.loads((folder / "references.json").read_text())["references"]:
            prompt, expected = entry["prompt_token_ids"], entry["token_ids"]
            blocks = list(range(-(-(len(prompt) + len(expected)) // 8)))
            count = min(8, len(expected))
            for step in range(count):
                sequence = new_sequence(
                    1, prompt + expected[:step], blocks, prompt_len=len(prompt), return_logprobs=True
                )
                if len(sequence.token_ids) > checkpoint.config.max_model_len:
                    break
                result = prefill(executor, sequence)
                if entry["margins"][step] > 1e-3:
                    assert list(result.token_ids) == expected[step : step + 1], (folder.name, entry["name"], step)
                    assert result.logprobs.logprobs[0] == pytest.approx(entry["logprobs"][step], abs=1e-3)
