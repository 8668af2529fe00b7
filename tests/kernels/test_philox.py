"""Philox4x32-10 against the vectors that Random123 publishes (kat_vectors)."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels.philox import gumbel_noise, philox4x32

VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    assert philox4x32(words(counter), words(key)) == words(expected)


def test_noise_of_the_first_ids():
    # Words 6627e8d5 and e169c58d: u = 0.399046451, 0.880520195; noise = -log(-log(u)).
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), 5)
    torch.testing.assert_close(noise[0, :2], torch.tensor([0.08482020, 2.06166123]), atol=1e-6, rtol=0)


def test_noise_uses_all_64_bits():
    seeds = torch.tensor([1, 1 + (1 << 32), -1, 1, 1])
    positions = torch.tensor([5, 5, 5, 5 + (1 << 32), 6])
    noise = gumbel_noise(seeds, positions, 16)
    assert len({tuple(row) for row in noise.tolist()}) == 5
    assert noise.isfinite().all()
