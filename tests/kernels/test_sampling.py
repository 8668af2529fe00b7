"""Gumbel arg max: the native sampler against the oracle, its distribution, and the rows that cannot be sampled."""

from __future__ import annotations

import math

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from octavo_kernels.philox import gumbel_noise
from tests.kernels.cases import ISAS, normal

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["native", "reference"])
def backend(request, native, reference):
    return native() if request.param == "native" else reference


def ids(backend, logits, temperature, seeds, positions):
    rows = len(logits)
    column = torch.full((rows,), float(temperature))
    return backend.gumbel_argmax(logits, column, torch.as_tensor(seeds), torch.as_tensor(positions))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 3, 16, 63, 64, 65, 1000, 49152])
def test_matches_reference(native, reference, isa, vocab):
    rows = 64
    seeds = torch.arange(rows) * 0x123456789ABCD - 77
    positions = torch.arange(rows) * 0x1234567
    # Flat logits: the noise alone decides, so that any wrong word would show.
    for logits in (torch.zeros(rows, vocab), normal(rows, vocab, dtype=torch.float32, seed=1)):
        expected = ids(reference, logits, 0.7, seeds, positions)
        assert torch.equal(ids(native(isa), logits, 0.7, seeds, positions), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_noise_to_the_last_digits(native, isa):
    """Finds an id's noise by bisection: how far another logit must rise to win."""
    backend, noise = native(isa), gumbel_noise(torch.tensor([42]), torch.tensor([9]), 64)[0]
    low, high = torch.full((63,), -40.0), torch.full((63,), 40.0)
    seeds, positions = torch.full((63,), 42), torch.full((63,), 9)
    for _ in range(60):
        middle = (low + high) / 2
        logits = torch.full((63, 64), -INF)
        logits[:, 0] = middle
        logits[torch.arange(63), torch.arange(1, 64)] = 0
        wins = ids(backend, logits, 1.0, seeds, positions) == 0
        low, high = torch.where(wins, low, middle), torch.where(wins, middle, high)
    torch.testing.assert_close(high, noise[1:] - noise[0], atol=2e-6, rtol=1e-6)


def test_distribution(backend):
    """Chi-square with 7 degrees of freedom; 24.3 is the 0.1 % point."""
    draws = 20000
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -INF, 1.5, -0.5, 0.2])
    expected = (logits / 0.8).softmax(-1) * draws
    out = ids(backend, logits.expand(draws, 9).contiguous(), 0.8, torch.full((draws,), 1234), torch.arange(draws))
    counts = torch.bincount(out, minlength=9)
    assert counts[5] == 0
    allowed = expected > 0
    assert ((counts - expected)[allowed] ** 2 / expected[allowed]).sum() < 24.3


def test_rows_do_not_depend_on_their_neighbours(backend):
    logits = normal(20, 500, dtype=torch.float32, seed=1)
    seeds, positions = torch.arange(20) * 99991, torch.arange(20) * 17
    together = ids(backend, logits, 1.0, seeds, positions)
    alone = [ids(backend, logits[i : i + 1], 1.0, seeds[i : i + 1], positions[i : i + 1]) for i in range(20)]
    assert torch.equal(together, torch.cat(alone))


def test_zero_temperature_takes_the_lowest_of_equals(backend):
    logits = torch.full((3, 200), -1.0)
    logits[0, [17, 40, 199]] = 3.0
    logits[1, [199]] = 3.0
    logits[2, :] = -INF
    logits[2, 150:] = -5.0
    assert ids(backend, logits, 0.0, [1, 2, 3], [4, 5, 6]).tolist() == [17, 199, 150]


def test_a_tiny_temperature_is_greedy(backend):
    logits = normal(8, 100, dtype=torch.float32, seed=1)
    for temperature in (1e-6, 1e-30, 1e-44):
        assert torch.equal(ids(backend, logits, temperature, range(8), range(8)), logits.argmax(-1))


def test_what_is_below_the_least_is_not_sampled(backend):
    logits = normal(40, 300, dtype=torch.float32, seed=1)
    least = logits.sort(dim=1).values[:, 297].clone()
    least[20:] = -INF
    columns = (torch.full((40,), 2.0), torch.arange(40), torch.arange(40))
    out = backend.gumbel_argmax(logits, *columns, least)
    assert bool((logits[torch.arange(40), out] >= least).all())
    assert torch.equal(out[20:], backend.gumbel_argmax(logits[20:], *(column[20:] for column in columns)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_is_minus_one(backend, temperature):
    logits = torch.zeros(5, 70)
    logits[1, 69] = NAN
    logits[2, 3] = INF
    logits[3] = -INF
    logits[4, :69] = -INF
    out = ids(backend, logits, temperature, range(5), range(5)).tolist()
    assert out[1:] == [-1, -1, -1, 69]
    assert out[0] >= 0


@pytest.mark.parametrize("temperature", [-1.0, NAN])
def test_refuses_a_wrong_temperature(backend, temperature):
    with pytest.raises(InvalidArgumentError, match="nan" if math.isnan(temperature) else "-1"):
        ids(backend, torch.zeros(1, 5), temperature, [0], [0])
