"""Which kernels a pass takes, and what attention and cache writes refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo_kernels import InvalidArgumentError
from octavo_kernels.reference import ReferenceBackend
from octavo_kernels.triton import paged_attention as module
from octavo_kernels.triton.paged_attention import paged_attention
from octavo_kernels.triton.write_kv import write_kv
from tests.kernels.triton.cases import paged_case

MIXED = [(40, 9), (70, 1), (5, 1)]
DECODES = [(40, 1), (70, 1)]


def check(case, batch):
    expected = ReferenceBackend().paged_attention(case.q, case.kv, case.batch, scale=0.125)
    out = paged_attention(case.q, case.kv, batch, scale=0.125)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched, in order."""
    names = []
    for name in ("paged_attention_decode", "paged_attention_prefill"):
        call = getattr(module, name)

        def record(*args, name=name, call=call, **options):
            names.append(name.removeprefix("paged_attention_"))
            call(*args, **options)

        monkeypatch.setattr(module, name, record)
    return names


def test_decodes_are_split(launched):
    case = paged_case(DECODES, heads=2, kv_heads=1, head_dim=64)
    check(case, case.batch)
    assert launched == ["decode"]


def test_a_mixed_pass_is_one_launch(launched):
    case = paged_case(MIXED, heads=2, kv_heads=1, head_dim=64)
    check(case, case.batch)
    assert launched == ["prefill"]


def test_long_contexts_beside_a_prefill_are_split(launched, monkeypatch):
    monkeypatch.setattr(module, "LONG_CONTEXT", 64)
    case = paged_case(MIXED, heads=2, kv_heads=1, head_dim=64)
    check(case, case.batch)
    assert launched == ["decode", "prefill"]


def test_without_a_bound_on_queries(launched):
    case = paged_case(DECODES, heads=2, kv_heads=1, head_dim=64)
    check(case, replace(case.batch, max_queries=None))
    assert launched == ["prefill"]


def test_a_pass_of_nothing():
    case = paged_case(DECODES, heads=2, kv_heads=1, head_dim=64)
    empty = replace(
        case.batch,
        positions=case.batch.positions[:0],
        query_starts=torch.zeros(1, dtype=torch.int32),
        block_tables=case.batch.block_tables[:0],
    )
    assert paged_attention(case.q[:0], case.kv, empty, scale=0.125).shape == (0, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 2, 32)}, "q has shape"),
        ({"q": torch.zeros(2, 2, 64, dtype=torch.float16)}, "kv's dtype, torch.float32, is needed"),
        ({"q": torch.zeros(2, 64, 2).transpose(1, 2)}, "the last dimension must be contiguous"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"positions": torch.zeros(2)}, "positions has shape"),
        ({"query_starts": torch.zeros(2, dtype=torch.int32)}, "query_starts has shape"),
        ({"block_tables": torch.zeros(2, 3)}, "block_tables has shape"),
    ],
)
def test_refuses(change, message):
    case = paged_case(DECODES, heads=2, kv_heads=1, head_dim=64)
    q = change.pop("q", case.q)
    columns = {name: change.pop(name) for name in ("positions", "query_starts", "block_tables") if name in change}
    with pytest.raises(InvalidArgumentError, match=message):
        paged_attention(q, case.kv, replace(case.batch, **columns), scale=0.125, **change)


def test_refuses_tiles_it_cannot_read():
    case = paged_case(DECODES, heads=2, kv_heads=1, head_dim=64)
    for kv, message in (
        (replace(case.kv, k=case.kv.k[:, :, :, ::2]), "kv.v has shape"),
        (replace(case.kv, k_scales=torch.zeros(1), v_scales=torch.zeros(1)), "have scales"),
        (replace(case.kv, k=case.kv.k.double(), v=case.kv.v.double()), "kv.k has dtype torch.float64"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            paged_attention(case.q, kv, case.batch, scale=0.125)


def test_write_kv_refuses():
    case = paged_case(DECODES, heads=2, kv_heads=1, head_dim=64)
    k, slots = torch.zeros(3, 1, 64), torch.arange(3).int()
    for arguments, message in (
        ((k[:2], k, case.kv, slots), "k has shape"),
        ((k, k.half(), case.kv, slots), "kv's dtype, torch.float32, is needed"),
        ((k, k, case.kv, slots.long()), "slots has shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            write_kv(*arguments)
