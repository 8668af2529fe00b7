"""Sampling in Triton: the oracle's ids, its noise, and the rows that cannot be sampled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton.gumbel_argmax import gumbel, gumbel_argmax
from tests.kernels.cases import normal

INF, NAN = float("inf"), float("nan")


def ids(sample, logits, temperature, seeds, positions, **more):
    column = torch.full((len(logits),), float(temperature))
    return sample(logits, column, torch.as_tensor(seeds), torch.as_tensor(positions), **more)


@pytest.mark.parametrize("vocab", [1, 63, 1000, 9000])
def test_matches_reference(reference, vocab):
    rows = 4
    seeds = torch.arange(rows) * 0x123456789ABCD - 77
    positions = torch.arange(rows) * 0x12345678987
    # Flat logits: the noise alone decides, so that any wrong word would show.
    for logits in (torch.zeros(rows, vocab), normal(rows, vocab, dtype=torch.float32, seed=1)):
        expected = ids(reference.gumbel_argmax, logits, 0.7, seeds, positions)
        assert torch.equal(ids(gumbel_argmax, logits, 0.7, seeds, positions), expected)


@triton.jit
def _gumbel_kernel(words_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, gumbel(tl.load(words_ptr + at).to(tl.uint32)))


def test_noise_to_the_last_digits():
    words = torch.randint(0, 1 << 32, (1024,), generator=torch.Generator().manual_seed(1))
    ends = [0, 1, 255, 256, 0x7FFFFF00, 0x7FFFFFFF, 0x80000000, 0x80000100, 0xFFFFFE00, 0xFFFFFEFF, 0xFFFFFF00]
    words[: len(ends)] = torch.tensor(ends)
    words[100:132] = (1 << 32) - (torch.arange(32) + 1) * 512  # where 1 - u is small
    u = (words >> 8).double() * 2.0**-24 + 2.0**-25
    out = torch.empty(1024)
    _gumbel_kernel[(1,)](words, out, BLOCK=1024)
    torch.testing.assert_close(out, -torch.log(-torch.log(u)).float(), atol=1e-6, rtol=5e-7)


def test_a_row_may_be_strided_and_has_its_own_result(reference):
    wide = normal(5, 500, dtype=torch.float32, seed=1)
    logits = wide[:, 17:400]
    seeds, positions = torch.arange(5) * 99991, torch.arange(5) * 17
    together = ids(gumbel_argmax, logits, 1.0, seeds, positions)
    assert torch.equal(together, ids(reference.gumbel_argmax, logits, 1.0, seeds, positions))
    assert torch.equal(together[3:4], ids(gumbel_argmax, logits[3:4], 1.0, seeds[3:4], positions[3:4]))


def test_zero_temperature_takes_the_lowest_of_equals():
    logits = torch.full((4, 9000), -1.0)
    logits[0, [17, 40, 8999]] = 3.0
    logits[1, [8999]] = 3.0
    logits[2, :] = -INF
    logits[2, 5000:] = -5.0
    logits[3, [4096, 8192]] = 0.0
    assert ids(gumbel_argmax, logits, 0.0, [1, 2, 3, 4], [4, 5, 6, 7]).tolist() == [17, 8999, 5000, 4096]


def test_what_is_below_the_least_is_not_sampled(reference):
    logits = normal(8, 300, dtype=torch.float32, seed=1)
    least = logits.sort(dim=1).values[:, 298].clone()
    least[4:] = -INF
    arguments = (2.0, range(8), range(8))
    out = ids(gumbel_argmax, logits, *arguments, least=least)
    assert torch.equal(out, ids(reference.gumbel_argmax, logits, *arguments, least=least))
    assert bool((logits[torch.arange(8), out] >= least).all())
    assert torch.equal(out[4:], ids(gumbel_argmax, logits[4:], 2.0, range(4, 8), range(4, 8)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_is_minus_one(temperature):
    logits = torch.zeros(5, 70)
    logits[1, 69] = NAN
    logits[2, 3] = INF
    logits[3] = -INF
    logits[4, :69] = -INF
    out = ids(gumbel_argmax, logits, temperature, range(5), range(5)).tolist()
    assert out[1:] == [-1, -1, -1, 69]
    assert out[0] >= 0


def test_a_row_of_a_wrong_temperature_is_minus_one():
    temperatures = torch.tensor([-1.0, NAN, 1.0])
    out = gumbel_argmax(torch.zeros(3, 5), temperatures, torch.arange(3), torch.arange(3)).tolist()
    assert out[:2] == [-1, -1]
    assert out[2] >= 0


def test_refuses():
    logits, zeros = torch.zeros(2, 5), torch.zeros(2)
    long = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InvalidArgumentError, match="logits has shape"):
        gumbel_argmax(logits.half(), zeros, long, long)
    with pytest.raises(InvalidArgumentError, match="seeds has shape"):
        gumbel_argmax(logits, zeros, long.int(), long)
    with pytest.raises(InvalidArgumentError, match="least has shape"):
        gumbel_argmax(logits, zeros, long, long, torch.zeros(3))
    assert gumbel_argmax(logits[:0], zeros[:0], long[:0], long[:0]).shape == (0,)
