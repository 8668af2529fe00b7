from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, load_backend
from octavo_worker.bans import NO_BANS
from octavo_worker.grammar import GrammarEngine
from octavo_worker.processors import LogitProcessors, TokenCounts
from octavo_worker.sequences import SequenceTable
from tests.worker.checkpoints import letters_to_ids

VOCAB = 96
MASKED = float("-inf")
INVALID, GRAMMAR = pb.SEQUENCE_ERROR_CODE_INVALID, pb.SEQUENCE_ERROR_CODE_GRAMMAR


class Rows:
    """Sequences in a table with their processors. entries: (prompt, output, parameters)."""

    def __init__(self, *entries: tuple[list[int], list[int], dict[str, Any]], grammars: GrammarEngine | None = None):
        self.processors = LogitProcessors(VOCAB, grammars)
        self.table = SequenceTable()
        rows = []
        for number, (prompt, output, params) in enumerate(entries):
            message = pb.SequenceParams(**params)
            tokens, no_blocks = np.array(prompt + output, np.int32), np.zeros(0, np.int32)
            processors = self.processors.prepare(message)
            rows.append(self.table.put(number, tokens, no_blocks, len(prompt), message, processors))
        self.rows = np.array(rows, np.int64)

    def append(self, *token_ids: int) -> None:
        """Appends a token to each sequence."""
        self.table.tokens.append(self.rows, np.ones(len(self.rows), np.int64), np.array(token_ids, np.int32))

    def adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        self.processors.adjust(changed, self.table, self.rows)
        return changed

    def problems(self) -> dict[int, tuple[int, str]]:
        return self._bans().problems

    def allowed(self) -> list[list[int] | None]:
        """What each may sample; None where nothing is banned."""
        bans = self._bans()
        assert bans.problems == {}
        logits = torch.zeros(len(self.rows), VOCAB)
        bans.apply(logits, load_backend("reference"))
        allowed = [(row == 0).nonzero().flatten().tolist() for row in logits]
        return [None if len(ids) == VOCAB else ids for ids in allowed]

    def _bans(self) -> Any:
        pending = self.processors.start(self.table, self.rows)
        return self.processors.bans(self.table, self.rows, self.table.tokens.lengths[self.rows], pending)


LOGITS = [1.5, -2.0, 0.25, 3.0, -0.5, 0.0, 2.25, -1.75]


def adjusted(prompt: list[int], output: list[int], **params: Any) -> list[float]:
    """The first eight logits."""
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, :8] = torch.tensor(LOGITS)
    changed = Rows((prompt, output, params)).adjusted(logits)[0]
    assert changed[8:].tolist() == [-9.0] * (VOCAB - 8)
    return changed[:8].tolist()


def test_repetition_penalty_as_in_transformers() -> None:
    """Values of its RepetitionPenaltyLogitsProcessor on prompt and output."""
    expected = [1.1538461446762085, -2.5999999046325684, 0.25, 2.307692289352417, -0.6499999761581421, 0.0]
    expected += [1.7307692766189575, -1.75]
    assert adjusted([3, 1, 6], [0, 4, 0], repetition_penalty=1.3) == pytest.approx(expected, rel=1e-6)
    expected = [1.875, -1.600000023841858, 0.25, 3.75, -0.4000000059604645, 0.0, 2.8125, -1.75]
    assert adjusted([3, 1, 6], [0, 4, 0], repetition_penalty=0.8) == pytest.approx(expected, rel=1e-6)


def test_bias_as_in_transformers() -> None:
    """Values of its SequenceBiasLogitsProcessor on single tokens."""
    expected = [4.0, -2.0, 0.25, 3.0, -0.5, 0.0, 2.25, -101.75]
    assert adjusted([3], [], logit_bias_token_ids=[0, 7], logit_biases=[2.5, -100.0]) == expected


def test_frequency_and_presence_penalties_look_at_the_output_alone() -> None:
    counted = [1.5 - 2 * 0.5 - 0.25, -2.0, 0.25, 3.0, -0.5 - 0.5 - 0.25, 0.0, 2.25, -1.75]
    assert adjusted([3, 1, 6, 3], [0, 4, 0], frequency_penalty=0.5, presence_penalty=0.25) == counted
    assert adjusted([3, 1], [0, 0], presence_penalty=-2.0)[0] == 3.5
    assert adjusted([3, 1], [], frequency_penalty=2.0, presence_penalty=2.0) == LOGITS


def test_order_is_bias_repetition_frequency_presence() -> None:
    changed = adjusted(
        [1], [0, 0], logit_bias_token_ids=[0, 1], logit_biases=[2.5, 3.0], repetition_penalty=2.0,
        frequency_penalty=1.0, presence_penalty=0.5,
    )  # fmt: skip
    assert changed[:2] == [(1.5 + 2.5) / 2 - 2 * 1.0 - 0.5, (-2.0 + 3.0) / 2]


def dense(logits: torch.Tensor, prompt: list[int], output: list[int], params: dict[str, Any]) -> torch.Tensor:
    """The oracle: every formula over the whole vocabulary of one row."""
    changed = logits.clone()
    for token_id, bias in zip(params.get("logit_bias_token_ids", []), params.get("logit_biases", []), strict=True):
        changed[token_id] += bias
    repetition = torch.tensor(params.get("repetition_penalty", 1.0))
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[prompt + output] = True
    counts = torch.tensor([float(Counter(output)[token_id]) for token_id in range(VOCAB)])
    changed = torch.where(seen, torch.where(changed > 0, changed / repetition, changed * repetition), changed)
    changed -= torch.tensor(params.get("frequency_penalty", 0.0)) * counts
    return changed - torch.tensor(params.get("presence_penalty", 0.0)) * (counts > 0)


PENALTIES = st.sampled_from([0.0, 0.5, -1.25, 2.0])
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": PENALTIES,
        "frequency_penalty": PENALTIES,
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7, 10.0]),
    },
) | st.just({"logit_bias_token_ids": [3, 95, 7], "logit_biases": [-100.0, 100.0, 0.1], "repetition_penalty": 1.1})
TOKENS = st.lists(st.integers(0, 9) | st.integers(0, VOCAB - 1), max_size=12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(TOKENS.map(lambda ids: [5, *ids]), TOKENS, PARAMS), min_size=1, max_size=5), st.data())
def test_rows_are_adjusted_as_by_the_oracle_whatever_stands_beside_them(
    entries: list[tuple[list[int], list[int], dict[str, Any]]], data: st.DataObject
) -> None:
    """While their output grows, bit by bit."""
    rows = Rows(*entries)
    outputs = [output for _, output, _ in entries]
    for step in range(3):
        logits = torch.randn(len(entries), VOCAB, generator=torch.Generator().manual_seed(step)) * 5
        changed = rows.adjusted(logits)
        for index, (prompt, _, params) in enumerate(entries):
            assert torch.equal(changed[index], dense(logits[index], prompt, outputs[index], params))
        assert rows.processors.adjusts(rows.table, rows.rows) or torch.equal(changed, logits)
        sampled = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(entries), max_size=len(entries)))
        rows.append(*sampled)
        outputs = [[*output, token_id] for output, token_id in zip(outputs, sampled, strict=True)]


def test_tokens_beyond_those_that_are_sampled_are_no_trouble() -> None:
    """The model's head has more rows than the tokenizer has tokens, and a prompt of ids names one of them."""
    found = adjusted([0, VOCAB, 500], [0, 700, VOCAB], repetition_penalty=2.0, presence_penalty=1.0)
    assert found == [1.5 / 2 - 1.0, *LOGITS[1:]]


@pytest.mark.parametrize("repetition", [1e-38, 1e-30, 1e30, 3e38])
def test_extreme_values_stay_finite(repetition: float) -> None:
    changed = torch.tensor(
        adjusted(
            [0, 1, 2, 3], [4, 5, 6, 7] * 500, repetition_penalty=repetition, frequency_penalty=-2.0,
            logit_bias_token_ids=[0, 1], logit_biases=[100.0, -100.0],
        )
    )  # fmt: skip
    assert bool(torch.isfinite(changed).all())
    assert float(changed.abs().max()) <= 1.0001e30


def test_counts_grow_with_their_output() -> None:
    counts = TokenCounts(1000, np.array([7, 3, 7, 1000], np.int32))
    assert (counts.ids.tolist(), counts.counts.tolist()) == ([3, 7], [0, 0])
    counts.extend(np.array([7, 9, 7], np.int32))
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {3: 0, 7: 2, 9: 1}
    counts.extend(np.arange(1005, dtype=np.int32))
    assert counts.num_output == 1008
    assert Counter(counts.counts.tolist()) == {1: 998, 2: 1, 3: 1}


def test_what_is_not_asked_for_costs_nothing() -> None:
    assert LogitProcessors(VOCAB, None).prepare(pb.SequenceParams(repetition_penalty=1.0, min_token_count=5)) is None
    rows = Rows(([1], [], {}), ([1], [2], {"temperature": 1.0}))
    assert rows._bans() is NO_BANS
    assert not rows.processors.adjusts(rows.table, rows.rows)
    assert rows.table.processors == {}


def test_allowed_ids_bad_words_and_suppressed_ids() -> None:
    rows = Rows(
        ([1], [], {}),
        ([1], [], {"allowed_token_ids": [3, 4, 5, 95]}),
        ([1], [8], {"allowed_token_ids": [3, 4, 5], "bad_word_token_ids": [4, 8, 3], "bad_word_lengths": [1, 2]}),
        ([8], [], {"allowed_token_ids": [3, 4], "bad_word_token_ids": [8, 3], "bad_word_lengths": [2]}),
        ([1], [2, 2], {"suppressed_token_ids": [*range(90)], "min_token_count": 3}),
        ([1], [2, 2, 2], {"suppressed_token_ids": [*range(90)], "min_token_count": 3}),
        ([1], [], {"allowed_token_ids": [7, 8], "suppressed_token_ids": [7], "min_token_count": 1}),
    )
    # A bad word must lie in the output as a whole: the fourth sequence's prompt ends in 8.
    assert rows.allowed() == [None, [3, 4, 5, 95], [5], [3, 4], [*range(90, 96)], None, [8]]


def test_grammar_with_other_bans(letters: GrammarEngine) -> None:
    y, n, e = letters_to_ids("yne")
    start = {"grammar": "start: /(yes|no)+/"}
    suppressed = {"suppressed_token_ids": [0, 1], "min_token_count": 9}
    rows = Rows(
        ([1], [], start),
        ([1], [], {}),
        ([1], [y], {**start, "bad_word_token_ids": [n], "bad_word_lengths": [1]}),
        ([1], letters_to_ids("yes"), start),
        ([1], letters_to_ids("yes"), {**start, **suppressed}),
        ([1], [], {**start, "allowed_token_ids": [n, e]}),
        ([1], letters_to_ids("ab"), {"grammar": 'start: "ab"', **suppressed}),
        grammars=letters,
    )
    assert rows.allowed() == [[y, n] if y < n else [n, y], None, [e], [0, 1, n, y], [n, y], [n], [0, 1]]


def test_nothing_left_fails_the_row_alone(letters: GrammarEngine) -> None:
    y, n = letters_to_ids("yn")
    rows = Rows(
        ([1], [], {"grammar": "start: /(yes|no)+/", "allowed_token_ids": [5]}),
        ([1], [], {"grammar": "start: /(yes|no)+/"}),
        ([1], [8], {"allowed_token_ids": [3], "bad_word_token_ids": [8, 3], "bad_word_lengths": [2]}),
        ([1], [y, y], {"grammar": "start: /(yes|no)+/"}),
        ([1], [8], {"allowed_token_ids": [3, 4], "suppressed_token_ids": [4], "min_token_count": 2,
                    "bad_word_token_ids": [8, 3], "bad_word_lengths": [2]}),
        grammars=letters,
    )  # fmt: skip
    bans = rows._bans()
    assert {row: code for row, (code, _) in bans.problems.items()} == {0: GRAMMAR, 2: INVALID, 3: GRAMMAR, 4: INVALID}
    assert bans.problems[0][1] == "the grammar and the banned tokens leave no token to sample"
    assert bans.problems[2][1] == "allowed tokens, bad words and suppressed tokens leave no token to sample"
    assert "doesn't satisfy the grammar" in bans.problems[3][1]
    kept = bans.take(np.array([index not in bans.problems for index in range(5)]))
    logits = torch.zeros(1, VOCAB)
    kept.apply(logits, load_backend("reference"))
    assert (logits[0] == 0).nonzero().flatten().tolist() == sorted([y, n])


def test_masks_of_sequences_that_dropped_out_meanwhile(letters: GrammarEngine, backend: Backend) -> None:
    """One of the sequences fails between the start of the masks and sampling."""
    texts = ["y", "n", "yes", "ye"]
    entries = [([1], letters_to_ids(text), {"grammar": "start: /(yes|no)+/"}) for text in texts]
    rows = Rows(entries[0], ([1], [], {}), *entries[1:], grammars=letters)
    pending = rows.processors.start(rows.table, rows.rows)
    left = rows.rows[[0, 1, 3, 4]]
    bans = rows.processors.bans(rows.table, left, rows.table.tokens.lengths[left], pending)
    logits = torch.zeros(4, VOCAB)
    bans.apply(logits, backend)
    found = [(row == 0).nonzero().flatten().tolist() for row in logits]
    e, n, y, s = letters_to_ids("enys")
    assert found == [[e], [*range(VOCAB)], [0, 1, n, y], [s]]
