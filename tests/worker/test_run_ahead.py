"""Steps in a device's queue before earlier ones are answered give the tokens of steps one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend
from octavo_worker.executor import Executor
from octavo_worker.models.decoder import Decoder
from octavo_worker.sequences import UNKNOWN_TOKEN
from octavo_worker.step import Step
from tests.worker.conftest import generate, new_sequence, schedule
from tests.worker.late_device import LateDevice, make_late_executor

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
OTHERS = ([7, 8], [50, 60, 70, 80], [1, 2, 3])
SAMPLINGS = ({}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.1, "seed": 6, "top_p": 0.8}, {})


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


def begin_prompts(late: Executor, prompts: Sequence[list[int]], samplings: Sequence[dict[str, float]]) -> Step:
    sequences = [
        new_sequence(i + 1, prompt, list(range(8 * i, 8 * i + 4)), **sampling)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    entries = [(item.sequence_id, 0, len(item.token_ids), True) for item in sequences]
    return late.begin(pb.StepPlan(new_sequences=sequences, scheduled=schedule(*entries)))


def run_two_ahead(late: Executor, prompts: Sequence[list[int]], count: int) -> dict[int, list[int]]:
    """`count` tokens of each prompt, with two plans in flight."""
    tokens: dict[int, list[int]] = {i + 1: [] for i in range(len(prompts))}
    steps = [begin_prompts(late, prompts, SAMPLINGS[: len(prompts)])]
    for number in range(count):
        if number + 1 < count:
            entries = [(i + 1, len(prompt) + number, 1, True) for i, prompt in enumerate(prompts)]
            steps.append(late.begin(pb.StepPlan(scheduled=schedule(*entries))))
        assert not steps[0].is_over
        result = steps.pop(0).finish()
        assert not result.errors
        for sequence_id, token in zip(result.sequence_ids, result.token_ids, strict=True):
            tokens[sequence_id].append(token)
    return tokens


@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8)], ids=["eager", "graphs"])
def test_two_plans_in_flight_give_the_same_tokens(
    sizes: tuple[int, ...], decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice
) -> None:
    prompts = (PROMPT, *OTHERS[:2])
    expected = {
        i + 1: generate(executor, new_sequence(1, prompt, [0, 1, 2, 3], **SAMPLINGS[i]), 12)
        for i, prompt in enumerate(prompts)
    }
    late = make_late_executor(decoder, backend, device, sizes=sizes)
    assert run_two_ahead(late, prompts, 12) == expected


def test_the_next_step_is_launched_before_the_last_one_is_waited_for(
    decoder: Decoder, backend: Backend, device: LateDevice
) -> None:
    late = make_late_executor(decoder, backend, device, sizes=(1, 2, 4))
    assert device.log == ["capture 4", "capture 2", "capture 1"]
    device.log.clear()
    run_two_ahead(late, (PROMPT, *OTHERS[:2]), 4)
    assert device.log == [
        "download 0",  # the prompts, op by op
        "replay 4",  # three sequences in a bucket of four
        "download 1",
        "wait 0",
        "replay 4",
        "download 2",
        "wait 1",
        "replay 4",
        "download 3",
        "wait 2",
        "wait 3",
    ]


def test_lanes_of_padding_write_to_no_block_of_a_sequence(
    decoder: Decoder, backend: Backend, device: LateDevice
) -> None:
    late = make_late_executor(decoder, backend, device, sizes=(8,))
    before = late.pool.device.clone()
    run_two_ahead(late, (PROMPT, *OTHERS[:2]), 6)
    changed = (late.pool.device != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [0, 1, 8, 16, 17]  # 15, 7 and 9 tokens


def test_prompts_decodes_and_sequences_that_come_and_go_mix(
    decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice
) -> None:
    first = generate(executor, new_sequence(1, PROMPT, [0, 1, 2, 3]), 5)
    second = generate(executor, new_sequence(1, OTHERS[1], [0, 1, 2, 3]), 4)
    late = make_late_executor(decoder, backend, device, sizes=(1, 2))
    steps = [
        late.begin(pb.StepPlan(new_sequences=[new_sequence(1, PROMPT, [0, 1])], scheduled=schedule((1, 0, 10, True)))),
        late.begin(
            pb.StepPlan(
                new_sequences=[new_sequence(2, OTHERS[1], [9])], scheduled=schedule((1, 10, 1, True), (2, 0, 2, False))
            )
        ),
        late.begin(pb.StepPlan(scheduled=schedule((2, 2, 2, True), (1, 11, 1, True)))),
        late.begin(pb.StepPlan(scheduled=schedule((2, 4, 1, True), (1, 12, 1, True)))),
        late.begin(pb.StepPlan(scheduled=schedule((2, 5, 1, True), (1, 13, 1, True)))),
        late.begin(pb.StepPlan(release_sequence_ids=[1], scheduled=schedule((2, 6, 1, True)))),
    ]
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for step in steps:
        result = step.finish()
        assert not result.errors
        for sequence_id, token in zip(result.sequence_ids, result.token_ids, strict=True):
            tokens[sequence_id].append(token)
    assert tokens == {1: first, 2: second}


def test_blocks_that_are_appended_reach_the_device(
    decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice
) -> None:
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1, 2, 3]), 16)
    late = make_late_executor(decoder, backend, device, sizes=(1,))
    steps = [begin_prompts(late, [PROMPT], [{}])]
    late.table.blocks.set(late.table.rows[1], np.array([0, 1], np.int32))
    for position in range(len(PROMPT), len(PROMPT) + 15):
        blocks = {1: [40 + position // 8]} if position % 8 == 0 and position >= 16 else {}
        steps.append(late.begin(pb.StepPlan(scheduled=schedule((1, position, 1, True), new_blocks=blocks))))
    assert [token for step in steps for token in step.finish().token_ids] == expected


def test_what_needs_tokens_waits_for_them(decoder: Decoder, backend: Backend, device: LateDevice) -> None:
    late = make_late_executor(decoder, backend, device)
    begin_prompts(late, [PROMPT], [{}])
    row = late.table.rows[1]
    assert late.table.tokens.get(row)[-1] == UNKNOWN_TOKEN
    device.log.clear()
    fork = pb.Forks(
        parent_sequence_ids=[1], child_sequence_ids=[2], token_ids=[5], block_counts=[4], block_ids=[0, 1, 2, 3],
        token_counts=[11],
    )  # fmt: skip
    late.begin(pb.StepPlan(forks=fork))
    assert device.log == ["wait 0"]
    assert late.table.tokens.get(row)[-1] >= 0
    assert late.table.tokens.get(late.table.rows[2])[10] == late.table.tokens.get(row)[-1]


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"allowed_token_ids": [4, 5, 6]},
        {"suppressed_token_ids": [4], "min_token_count": 3},
        {"candidate_count": 4},
    ],
    ids=lambda params: next(iter(params)),
)
def test_steps_that_the_host_must_see_are_done_one_by_one(
    params: dict[str, object], decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice
) -> None:
    plans = [
        pb.StepPlan(
            new_sequences=[new_sequence(1, PROMPT, [0, 1, 2, 3]), new_sequence(2, PROMPT, [4, 5, 6, 7], **params)],
            scheduled=schedule((1, 0, 10, True)),
        ),
        pb.StepPlan(scheduled=schedule((1, 10, 1, True), (2, 0, 10, True))),
        pb.StepPlan(scheduled=schedule((1, 11, 1, True))),
    ]
    late = make_late_executor(decoder, backend, device)
    steps = [late.begin(plan) for plan in plans]
    assert [step.launch is not None for step in steps] == [True, False, True]
    assert device.log == ["download 0", "wait 0", "download 1"]
    for step, plan in zip(steps, plans, strict=True):
        expected, result = executor.execute(plan), step.finish()
        for answer in (expected, result):
            answer.ClearField("duration_us")
            answer.ClearField("idle_us")
        assert result == expected


def test_a_minimum_length_is_the_hosts_only_until_it_is_reached(
    decoder: Decoder, backend: Backend, device: LateDevice
) -> None:
    late = make_late_executor(decoder, backend, device)
    params = {"suppressed_token_ids": [4], "min_token_count": 2}
    steps = [begin_prompts(late, [PROMPT], [params])]
    steps += [late.begin(pb.StepPlan(scheduled=schedule((1, 10 + number, 1, True)))) for number in range(3)]
    assert [step.launch is not None for step in steps] == [False, False, True, True]


def test_prompts_that_are_scored_are_the_hosts_and_their_output_is_not(
    decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice
) -> None:
    params = {"return_prompt_logprobs": True, "top_prompt_logprob_count": 1}
    plans = [
        pb.StepPlan(new_sequences=[new_sequence(1, PROMPT, [0, 1], **params)], scheduled=schedule((1, 0, 6, False))),
        *(pb.StepPlan(scheduled=schedule(entry)) for entry in ((1, 6, 4, True), (1, 10, 1, True), (1, 11, 1, True))),
    ]
    late = make_late_executor(decoder, backend, device)
    steps = [late.begin(plan) for plan in plans]
    assert [step.launch is not None for step in steps] == [False, False, True, True]
    expected = [executor.execute(plan) for plan in plans]
    assert [step.finish().token_ids for step in steps] == [result.token_ids for result in expected]
    assert [step.finish().prompt_logprobs for step in steps] == [result.prompt_logprobs for result in expected]


@pytest.mark.parametrize("sizes", [(), (1, 2, 4)], ids=["eager", "graphs"])
def test_log_probabilities_come_back_with_their_tokens(
    sizes: tuple[int, ...], decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice
) -> None:
    wishes = [{"return_logprobs": True, "top_logprob_count": 3, "temperature": 0.8, "seed": 4}, {}]
    wishes += [{"return_logprobs": True}, {"return_logprobs": True, "top_logprob_count": 96}]
    sequences = [
        new_sequence(number + 1, prompt, list(range(8 * number, 8 * number + 4)), **wish)
        for number, (prompt, wish) in enumerate(zip((PROMPT, *OTHERS), wishes, strict=True))
    ]
    lengths = [len(sequence.token_ids) for sequence in sequences]
    plans = [
        pb.StepPlan(
            new_sequences=sequences,
            scheduled=schedule(*((number + 1, 0, length, True) for number, length in enumerate(lengths))),
        ),
        *(
            pb.StepPlan(
                scheduled=schedule(*((number + 1, length + step, 1, True) for number, length in enumerate(lengths)))
            )
            for step in range(3)
        ),
    ]
    late = make_late_executor(decoder, backend, device, sizes=sizes)
    steps = [late.begin(plan) for plan in plans]
    for step, plan in zip(steps, plans, strict=True):
        expected, result = executor.execute(plan), step.finish()
        assert step.launch is not None
        assert result.token_ids == expected.token_ids
        assert list(result.logprobs.top_counts) == [3, 0, 96]
        assert result.logprobs.top_token_ids == expected.logprobs.top_token_ids
        for name in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(
                getattr(result.logprobs, name), getattr(expected.logprobs, name), rtol=1e-5, atol=1e-5
            )


def test_a_sequence_whose_logits_are_not_finite_fails_alone_and_once(
    decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(executor, new_sequence(1, OTHERS[0], [0, 1, 2, 3]), 3)
    late = make_late_executor(decoder, backend, device)
    real = decoder.logits

    def broken(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = real(hidden, rows)
        logits[0, 5] = float("nan")
        return logits

    monkeypatch.setattr(decoder, "logits", broken)
    steps = [begin_prompts(late, [PROMPT, OTHERS[0]], [{}, {}])]
    monkeypatch.undo()
    steps.append(late.begin(pb.StepPlan(scheduled=schedule((1, 10, 1, True), (2, 2, 1, True)))))
    steps.append(late.begin(pb.StepPlan(scheduled=schedule((1, 11, 1, True), (2, 3, 1, True)))))
    results = [step.finish() for step in steps]
    assert [[error.message for error in result.errors] for result in results] == [
        ["the model's logits are not finite"],
        [],
        [],
    ]
    assert [list(result.sequence_ids) for result in results] == [[2], [2], [2]]
    assert [token for result in results for token in result.token_ids] == expected
    later = late.execute(pb.StepPlan(scheduled=schedule((1, 12, 1, True))))
    assert not later.errors
    assert not later.sequence_ids


def test_a_row_that_another_sequence_got_keeps_that_ones_tokens(
    decoder: Decoder, backend: Backend, device: LateDevice
) -> None:
    late = make_late_executor(decoder, backend, device)
    steps = [begin_prompts(late, [PROMPT], [{}])]
    row = late.table.rows[1]
    late.begin(pb.StepPlan(release_sequence_ids=[1], new_sequences=[new_sequence(2, [9] * 11, [4, 5])]))
    assert late.table.rows[2] == row
    assert list(steps[0].finish().sequence_ids) == [1]
    assert late.table.tokens.get(row).tolist() == [9] * 11


def test_more_sequences_than_rows(decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice) -> None:
    late = make_late_executor(decoder, backend, device, num_blocks=140, sizes=(1, 2, 4, 8))
    expected = generate(executor, new_sequence(1, [7, 8], [0]), 3)
    steps = [late.begin(pb.StepPlan(new_sequences=[new_sequence(1, [7, 8], [0])], scheduled=schedule((1, 0, 2, True))))]
    crowd = [new_sequence(number, [7, 8], [number]) for number in range(2, 130)]
    steps.append(
        late.begin(
            pb.StepPlan(
                new_sequences=crowd, scheduled=schedule((1, 2, 1, True), *((n, 0, 2, True) for n in range(2, 130)))
            )
        )
    )
    steps.append(late.begin(pb.StepPlan(scheduled=schedule((1, 3, 1, True), *((n, 2, 1, True) for n in range(2, 9))))))
    results = [step.finish() for step in steps]
    assert [result.token_ids[0] for result in results] == expected
    assert set(results[1].token_ids[1:]) == {expected[0]}
    assert set(results[2].token_ids[1:]) == {expected[1]}


def test_a_reset_forgets_what_is_under_way(
    decoder: Decoder, backend: Backend, executor: Executor, device: LateDevice
) -> None:
    expected = generate(executor, new_sequence(1, PROMPT, [0, 1, 2, 3]), 4)
    late = make_late_executor(decoder, backend, device, sizes=(1,))
    step = begin_prompts(late, [[1, 2, 3]], [{}])
    late.reset()
    assert not step.finish().sequence_ids
    assert generate(late, new_sequence(1, PROMPT, [0, 1, 2, 3]), 4) == expected


def test_time_without_work_is_none_while_a_step_is_under_way(
    decoder: Decoder, backend: Backend, device: LateDevice
) -> None:
    late = make_late_executor(decoder, backend, device)
    steps = [begin_prompts(late, [PROMPT], [{}])]
    steps.append(late.begin(pb.StepPlan(scheduled=schedule((1, 10, 1, True)))))
    results = [step.finish() for step in steps]
    assert results[0].idle_us > 0
    assert results[1].idle_us == 0
    assert late.execute(pb.StepPlan()).idle_us > 0


def test_a_step_waits_for_the_moves_of_its_blocks(
    decoder: Decoder, backend: Backend, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = make_late_executor(decoder, backend, device, sizes=(1, 2))
    begin_prompts(late, [PROMPT, OTHERS[0]], [{}, {}])
    device.log.clear()
    monkeypatch.setattr(type(late.pool), "is_moving", True)
    monkeypatch.setattr(
        late.pool, "before_use", lambda blocks: device.log.append(f"wait for moves of {sorted(blocks.tolist())}")
    )
    late.begin(pb.StepPlan(scheduled=schedule((1, 10, 1, True), (2, 2, 1, True))))
    assert device.log == ["wait for moves of [0, 1, 2, 3, 8, 9, 10, 11]", "replay 2", "download 1"]
