"""Beam search against transformers' own, over a language model that is a table, and its edges by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_router.beam_search import BeamSearch, BeamStep, Hypothesis
from octavo_router.request import Beams, EarlyStopping, FinishReason

TABLE = json.loads((Path(__file__).parent.parent / "references" / "beams" / "table.json").read_text(encoding="utf-8"))
EOS = 0
Candidates = list[tuple[int, float]]


class TableModel:
    """A language model: the log-probabilities of the next token follow from the position and the last token."""

    def __init__(self, table: list[list[list[float]]]) -> None:
        self.table = table

    def candidates(self, token_ids: list[int], num_candidates: int) -> Candidates:
        row = self.table[len(token_ids) - 1][token_ids[-1]]
        return sorted(enumerate(row), key=lambda entry: -entry[1])[:num_candidates]


class Recorder:
    """Drives a search as the scheduler does: it keeps each beam's tokens itself, and follows `parents`."""

    def __init__(self, search: BeamSearch, first_token_id: int) -> None:
        self.search = search
        self.beams = [[first_token_id]]
        self.num_steps = 0

    def run(self, model: TableModel) -> None:
        while not self.search.is_done:
            self.step([model.candidates(beam, self.search.num_candidates) for beam in self.beams])

    def step(self, candidates: list[Candidates]) -> BeamStep:
        step = self.search.step(candidates)
        self.num_steps += 1
        self.beams = [
            [*self.beams[parent], token_id] for parent, token_id in zip(step.parents, step.token_ids, strict=True)
        ]
        return step


def beam_search(
    width: int,
    *,
    max_tokens: int = 8,
    eos_token_ids: frozenset[int] = frozenset({EOS}),
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.FALSE,
) -> BeamSearch:
    params = Beams(width, length_penalty=length_penalty, early_stopping=early_stopping)
    return BeamSearch(params, max_tokens=max_tokens, eos_token_ids=eos_token_ids)


def name_of(case: dict[str, Any]) -> str:
    return (
        f"{case['beam_width']}-{len(case['eos_token_ids'])}eos-{case['length_penalty']}-{case['early_stopping']}"
        f"-{case['max_tokens']}"
    )


@pytest.mark.parametrize("case", TABLE["searches"], ids=name_of)
def test_equals_transformers_bit_for_bit(case: dict[str, Any]) -> None:
    eos = frozenset(case["eos_token_ids"])
    search = beam_search(
        case["beam_width"],
        max_tokens=case["max_tokens"],
        eos_token_ids=eos,
        length_penalty=case["length_penalty"],
        early_stopping=EarlyStopping(case["early_stopping"]),
    )
    recorder = Recorder(search, case["first_token_id"])
    recorder.run(TableModel(TABLE["table"]))
    hypotheses = search.hypotheses(case["beam_width"])
    assert [list(hypothesis.token_ids) for hypothesis in hypotheses] == case["token_ids"]
    assert [hypothesis.score for hypothesis in hypotheses] == case["scores"]
    assert recorder.num_steps == case["num_steps"]
    for hypothesis in hypotheses:
        ended = hypothesis.token_ids[-1] in eos
        assert hypothesis.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


def test_references_reach_what_they_are_for() -> None:
    """Searches that end early, at max_tokens, and differently for each early_stopping."""
    searches = TABLE["searches"]
    early = [case for case in searches if case["num_steps"] < case["max_tokens"]]
    for early_stopping in ("false", "true", "never"):
        assert sum(case["early_stopping"] == early_stopping for case in early) >= 5
    assert sum(case["num_steps"] == case["max_tokens"] > 1 for case in searches) >= 50


class TestSteps:
    def test_first_step_forks_the_prompt(self) -> None:
        step = beam_search(2).step([[(5, -0.5), (7, -1.0), (6, -2.0), (9, -3.0)]])
        assert step == BeamStep(parents=[0, 0], token_ids=[5, 7], is_done=False)

    def test_one_beam_may_take_all_places(self) -> None:
        search = beam_search(2)
        search.step([[(5, -0.5), (7, -1.0), (6, -2.0), (9, -3.0)]])
        step = search.step(
            [[(1, -2.0), (2, -3.0), (3, -4.0), (4, -5.0)], [(8, -0.25), (7, -0.5), (6, -6.0), (5, -7.0)]]
        )
        assert step == BeamStep(parents=[1, 1], token_ids=[8, 7], is_done=False)
        assert [search.beam_token_ids(index) for index in range(search.num_beams)] == [[7, 8], [7, 7]]

    def test_places_of_ended_beams_go_to_the_next_likeliest(self) -> None:
        search = beam_search(2)
        step = search.step([[(EOS, -0.5), (7, -1.0), (6, -2.0), (9, -3.0)]])
        assert step == BeamStep(parents=[0, 0], token_ids=[7, 6], is_done=False)
        assert search.hypotheses(2) == [Hypothesis((EOS,), -0.5, -0.5, FinishReason.STOP)]

    def test_an_end_behind_the_first_beam_width_is_no_hypothesis(self) -> None:
        search = beam_search(2)
        step = search.step([[(5, -0.5), (7, -1.0), (EOS, -1.5), (9, -3.0)]])
        assert step.token_ids == [5, 7]
        assert search.hypotheses(2) == []

    def test_exact_ties_go_to_the_lower_beam_and_the_earlier_candidate(self) -> None:
        search = beam_search(2)
        assert search.step([[(9, -1.0), (3, -1.0), (6, -1.0), (5, -1.0)]]).token_ids == [9, 3]
        step = search.step([[(8, -1.0), (2, -1.0), (7, -1.0), (6, -1.0)]] * 2)
        assert step == BeamStep(parents=[0, 0], token_ids=[8, 2], is_done=False)

    def test_sums_are_rounded_to_fp32(self) -> None:
        """2^24 + 1 is not an fp32 number: the second step's candidates tie, and the lower beam wins."""
        search = beam_search(1, eos_token_ids=frozenset())
        search.step([[(1, -(2.0**24)), (2, -(2.0**25))]])
        search.step([[(3, -1.0), (4, 0.0)]])
        assert search.beam_token_ids(0) == [1, 3]

    @pytest.mark.parametrize(("width", "num_eos", "expected"), [(1, 0, 2), (1, 3, 4), (4, 1, 8), (4, 4, 8), (2, 5, 7)])
    def test_num_candidates_outlasts_all_ends(self, width: int, num_eos: int, expected: int) -> None:
        search = beam_search(width, eos_token_ids=frozenset(range(num_eos)))
        assert search.num_candidates == expected
        # The prompt's likeliest continuations are all the ends there are.
        step = search.step([[(token_id, -0.1 * token_id - 0.1) for token_id in range(expected)]])
        assert step.is_done or step.token_ids == list(range(num_eos, num_eos + width))


class TestEnd:
    def test_max_tokens_1_takes_the_likeliest_continuations(self) -> None:
        search = beam_search(2, max_tokens=1)
        step = search.step([[(5, -0.5), (EOS, -1.0), (6, -2.0), (9, -3.0)]])
        assert step == BeamStep(parents=[], token_ids=[], is_done=True)
        assert search.hypotheses(2) == [
            Hypothesis((5,), -0.5, -0.5, FinishReason.LENGTH),
            Hypothesis((EOS,), -1.0, -1.0, FinishReason.STOP),
        ]

    def test_width_1_ends_with_the_first_end_unless_longer_may_score_higher(self) -> None:
        first = [(EOS, -1.0), (7, -1.5)]
        search = beam_search(1)
        assert search.step([first]).is_done
        assert search.hypotheses(1) == [Hypothesis((EOS,), -1.0, -1.0, FinishReason.STOP)]
        search = beam_search(1, early_stopping=EarlyStopping.NEVER)
        assert search.step([first]) == BeamStep([0], [7], is_done=False)
        assert search.step([[(EOS, -0.25), (8, -3.0)]]) == BeamStep([0], [8], is_done=False)
        assert search.hypotheses(1) == [Hypothesis((7, EOS), -1.75, -0.875, FinishReason.STOP)]

    def test_all_beams_end_at_once(self) -> None:
        search = beam_search(2, eos_token_ids=frozenset({0, 1}), early_stopping=EarlyStopping.TRUE)
        assert search.step([[(1, -0.5), (0, -1.0), (6, -2.0), (9, -3.0)]]).is_done
        assert [hypothesis.token_ids for hypothesis in search.hypotheses(2)] == [(1,), (0,)]
        assert search.num_beams == 0

    def test_early_stopping_true_ends_with_beam_width_hypotheses_though_better_may_come(self) -> None:
        """After two steps two hypotheses have ended with means -1.5 and -3; the best running beam has -1.75."""
        first = [(EOS, -3.0), (5, -3.0), (6, -4.0), (7, -5.0)]
        second = [[(EOS, 0.0), (8, -0.5), (9, -6.0), (2, -7.0)], [(3, -9.0), (4, -10.0), (2, -11.0), (1, -12.0)]]
        done = {}
        for early_stopping in EarlyStopping:
            search = beam_search(2, early_stopping=early_stopping)
            assert not search.step([first]).is_done
            done[early_stopping] = search.step(second).is_done
            assert [hypothesis.score for hypothesis in search.hypotheses(2)] == [-1.5, -3.0]
        assert done == {EarlyStopping.FALSE: False, EarlyStopping.TRUE: True, EarlyStopping.NEVER: False}

    def test_early_stopping_false_judges_at_the_current_length_and_never_at_the_longest(self) -> None:
        """A running sum of -4 has a mean of -2 now, below the worst of -1.5; after eight tokens it would have -0.5."""
        done = {}
        for early_stopping in (EarlyStopping.FALSE, EarlyStopping.NEVER):
            search = beam_search(1, early_stopping=early_stopping)
            search.step([[(5, -3.0), (6, -4.0)]])
            done[early_stopping] = search.step([[(EOS, 0.0), (8, -1.0)]]).is_done
        assert done == {EarlyStopping.FALSE: True, EarlyStopping.NEVER: False}

    def test_never_judges_at_the_current_length_where_the_penalty_does_not_favour_long_ones(self) -> None:
        search = beam_search(1, early_stopping=EarlyStopping.NEVER, length_penalty=0.0)
        search.step([[(5, -3.0), (6, -4.0)]])
        assert search.step([[(EOS, 0.0), (8, -1.0)]]).is_done

    def test_a_better_hypothesis_takes_the_worst_ones_place(self) -> None:
        search = beam_search(1, early_stopping=EarlyStopping.NEVER, max_tokens=3)
        search.step([[(EOS, -2.0), (5, -2.5)]])
        search.step([[(6, -0.25), (7, -9.0)]])
        assert search.step([[(8, -0.25), (EOS, -1.0)]]).is_done
        assert search.hypotheses(1) == [Hypothesis((5, 6, 8), -3.0, -1.0, FinishReason.LENGTH)]

    def test_fewer_hypotheses_than_beams_can_be_asked_for(self) -> None:
        search = beam_search(3, max_tokens=1)
        search.step([[(5, -0.5), (6, -1.0), (7, -2.0), (8, -3.0), (9, -4.0), (4, -5.0)]])
        assert [hypothesis.token_ids for hypothesis in search.hypotheses(2)] == [(5,), (6,)]
        assert len(search.hypotheses(9)) == 3

    def test_impossible_continuations_never_become_hypotheses(self) -> None:
        """A mask leaves one token: one beam goes on, and beside it nothing that could end."""
        search = beam_search(2, max_tokens=2)
        search.step([[(5, -0.5), (6, -math.inf), (7, -math.inf), (8, -math.inf)]])
        assert search.step([[(5, -0.5), (6, -math.inf), (7, -math.inf), (8, -math.inf)]] * 2).is_done
        assert search.hypotheses(2) == [Hypothesis((5, 5), -1.0, -0.5, FinishReason.LENGTH)]

    def test_ends_where_nothing_possible_is_left(self) -> None:
        search = beam_search(2)
        assert search.step([[(EOS, -0.5), (6, -math.inf), (7, -math.inf), (8, -math.inf)]]).is_done
        assert search.hypotheses(2) == [Hypothesis((EOS,), -0.5, -0.5, FinishReason.STOP)]


class TestRefusals:
    @pytest.mark.parametrize(
        ("params", "max_tokens"),
        [
            (Beams(0), 8),
            (Beams(2), 0),
            (Beams(2, length_penalty=math.nan), 1),
            (Beams(2, length_penalty=math.inf), 1),
            (Beams(2, length_penalty=40.0), 48),
            (Beams(2, length_penalty=-40.0), 48),
            (Beams(2, length_penalty=1000.0), 48),
        ],
    )
    def test_parameters_without_meaning(self, params: Beams, max_tokens: int) -> None:
        with pytest.raises(ValueError, match=r"beam_width|length_penalty"):
            BeamSearch(params, max_tokens=max_tokens, eos_token_ids=frozenset({EOS}))

    def test_too_few_candidates_change_nothing(self) -> None:
        search = beam_search(2)
        with pytest.raises(ValueError, match="3 candidates for a beam"):
            search.step([[(5, -0.5), (7, -1.0), (6, -2.0)]])
        assert search.num_beams == 1
        assert search.beam_token_ids(0) == []

    def test_lists_must_be_one_a_beam(self) -> None:
        with pytest.raises(ValueError, match="2 lists of candidates for 1 beams"):
            beam_search(2).step([[(5, -0.5), (7, -1.0), (6, -2.0), (9, -3.0)]] * 2)

    def test_no_step_after_the_last(self) -> None:
        search = beam_search(1, max_tokens=1)
        search.step([[(5, -0.5), (7, -1.0)]])
        with pytest.raises(ValueError, match="done"):
            search.step([])


@given(
    first_token_id=st.integers(0, 11),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 9),
    eos_token_ids=st.frozensets(st.integers(0, 11), max_size=4),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 3.0]),
    early_stopping=st.sampled_from(EarlyStopping),
)
def test_histories_sums_and_scores_agree(
    first_token_id: int,
    width: int,
    max_tokens: int,
    eos_token_ids: frozenset[int],
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> None:
    """Hypotheses are distinct, in order, and carry the sums of their own tokens; beams are as `parents` tells."""
    search = beam_search(
        width,
        max_tokens=max_tokens,
        eos_token_ids=eos_token_ids,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    recorder, model = Recorder(search, first_token_id), TableModel(TABLE["table"])
    while not search.is_done:
        recorder.step([model.candidates(beam, search.num_candidates) for beam in recorder.beams])
        assert [search.beam_token_ids(index) for index in range(search.num_beams)] == [
            beam[1:] for beam in recorder.beams
        ]
        assert len({tuple(beam) for beam in recorder.beams}) == len(recorder.beams) == (0 if search.is_done else width)
        assert not any(eos_token_ids & set(beam[1:]) for beam in recorder.beams)
    assert recorder.num_steps <= max_tokens
    hypotheses = search.hypotheses(width)
    assert len({hypothesis.token_ids for hypothesis in hypotheses}) == width
    assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
    for hypothesis in hypotheses:
        history = [first_token_id, *hypothesis.token_ids]
        logprobs = [TABLE["table"][i][history[i]][history[i + 1]] for i in range(len(hypothesis.token_ids))]
        assert hypothesis.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-5)
        assert hypothesis.score == pytest.approx(sum(logprobs) / len(logprobs) ** length_penalty, rel=1e-5)
        assert len(logprobs) == max_tokens or hypothesis.token_ids[-1] in eos_token_ids
