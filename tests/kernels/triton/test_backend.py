"""The Triton backend as a whole: every op of the interface, chosen by name, and torch's own linear layers in it."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("triton")

from octavo_kernels import Backend, InvalidArgumentError, available_backends, load_backend
from octavo_kernels.triton.backend import TritonBackend
from tests.kernels.cases import DTYPES, TOLERANCES, normal


@pytest.fixture
def backend() -> TritonBackend:
    return TritonBackend("cpu")


def test_is_chosen_by_name_where_kernels_are_interpreted():
    backend = load_backend("triton", device="cpu")
    assert backend.name == "triton"
    assert backend.describe() == "triton (cpu, interpreted)"
    assert not backend.row_invariant
    assert backend.only_enqueues
    assert (available_backends()["triton"] is None) == torch.cuda.is_available()


def test_has_every_op_with_the_interface_s_arguments():
    ops = {name: op for name, op in vars(Backend).items() if inspect.isfunction(op) and not name.startswith("_")}
    assert len(ops) > 10
    for name, op in ops.items():
        wanted, given = (inspect.signature(f).parameters for f in (op, getattr(TritonBackend, name)))
        assert list(given) == list(wanted), name
        assert [p.default for p in given.values()] == [p.default for p in wanted.values()], name
    for name in Backend.__annotations__:
        assert hasattr(TritonBackend("cpu"), name), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(backend, reference, dtype, has_bias):
    weight = normal(30, 50, dtype=dtype, seed=1, scale=0.1)
    bias = normal(30, dtype=dtype, seed=2) if has_bias else None
    x, residual = normal(7, 50, dtype=dtype, seed=3), normal(7, 30, dtype=dtype, seed=4)
    layer, oracle = backend.linear(weight, bias), reference.linear(weight, bias)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(layer(x), oracle(x), atol=atol, rtol=rtol)
    torch.testing.assert_close(layer(x, residual.clone()), oracle(x, residual), atol=atol, rtol=rtol)
    assert (layer.in_features, layer.out_features) == (50, 30)


def test_linear_argmax(backend, reference):
    """Whole numbers, so that results are exact and many of them equal."""
    weight = torch.randint(-2, 3, (100, 8), generator=torch.Generator().manual_seed(1)).float()
    x = torch.randint(-2, 3, (9, 8), generator=torch.Generator().manual_seed(2)).float()
    x[4, 0] = float("nan")
    found = backend.linear_argmax(backend.linear(weight), x)
    assert torch.equal(found, reference.linear_argmax(reference.linear(weight), x))
    assert found[4] == -1


def test_linear_refuses(backend):
    with pytest.raises(InvalidArgumentError, match="bias has shape"):
        backend.linear(torch.ones(3, 4), torch.ones(4))
    with pytest.raises(InvalidArgumentError, match="x has shape"):
        backend.linear(torch.ones(3, 4))(torch.ones(2, 3))
