"""Norms in Triton against the oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import InvalidArgumentError
from octavo_kernels.triton.rms_norm import rms_norm
from tests.kernels.cases import DTYPES, TOLERANCES, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 15), (19, 100), (2, 2100), (0, 16)])
def test_matches_reference(reference, dtype, rows, n):
    x, weight = normal(rows, n, dtype=dtype, seed=1, scale=3), normal(n, dtype=dtype, seed=2)
    atol, rtol = TOLERANCES[dtype]
    out = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), atol=atol, rtol=rtol)
    widened = rms_norm(x, weight.float() + 1, 1e-5)
    torch.testing.assert_close(widened, reference.rms_norm(x, weight.float() + 1, 1e-5), atol=atol, rtol=rtol)
    if rows:
        assert torch.equal(rms_norm(x[-1:], weight, 1e-5)[0], out[-1])


def test_strided_heads():
    wide = normal(5, 300, dtype=torch.float32, seed=1)
    weight = normal(24, dtype=torch.float32, seed=2)
    heads = wide[:, 60:180].unflatten(1, (5, 24))
    out = rms_norm(heads, weight, 1e-6)
    assert out.is_contiguous()
    assert torch.equal(out, rms_norm(heads.contiguous(), weight, 1e-6))
    assert torch.equal(out.flatten(0, 1), rms_norm(heads.contiguous().view(1, 5, 5, 24), weight, 1e-6).view(25, 24))


def test_written_down():
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[0.84852814, 11.3137085]]))


def test_refuses():
    x, weight = torch.ones(2, 8), torch.ones(8)
    for wrong in (torch.ones(7), torch.ones(16)[::2], torch.ones(8, dtype=torch.float16)):
        with pytest.raises(InvalidArgumentError, match="weight has shape"):
            rms_norm(x, wrong, 1e-5)
    with pytest.raises(InvalidArgumentError, match=r"x has dtype torch\.float64"):
        rms_norm(x.double(), weight.double(), 1e-5)
    with pytest.raises(InvalidArgumentError, match="must be contiguous"):
        rms_norm(torch.ones(8, 2).T, weight, 1e-5)
