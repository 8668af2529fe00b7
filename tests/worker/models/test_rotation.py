from __future__ import annotations

import pytest
import torch

from octavo_worker.models.rotation import Rotation

ORDERS = [1, 2, 3, 8, 24, 96, 100, 128, 576, 896, 4096]


@pytest.mark.parametrize("order", ORDERS)
def test_is_orthonormal(order: int) -> None:
    matrix = Rotation(order).rotate(torch.eye(order))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order), atol=3e-6, rtol=0)


@pytest.mark.parametrize("order", ORDERS)
def test_any_dimension(order: int) -> None:
    rotation, x = Rotation(order), torch.randn(3, order, generator=torch.Generator().manual_seed(1))
    expected = x @ rotation.rotate(torch.eye(order))
    torch.testing.assert_close(rotation.rotate(x), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotation.rotate(x.T.contiguous(), dim=0), expected.T, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotation.rotate(x[0]), expected[0], atol=1e-5, rtol=0)


def test_is_always_the_same_and_leaves_its_argument_alone() -> None:
    x = torch.arange(96.0)
    assert torch.equal(Rotation(96).rotate(x), Rotation(96).rotate(x))
    assert torch.equal(x, torch.arange(96.0))


@pytest.mark.parametrize("order", [576, 896, 4096])
def test_spreads_what_is_large(order: int) -> None:
    rows = Rotation(order).rotate(torch.eye(order))
    assert rows.abs().max() < 1.5 * order**-0.5  # the cosines of the odd part exceed 1 by the root of 2
