"""Attention of mixed passes against the oracle: chunks, decodes, head sizes, options, dtypes, layouts."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels.reference import ReferenceBackend
from octavo_kernels.triton import paged_attention_prefill as module
from octavo_kernels.triton.paged_attention_prefill import heads_together, paged_attention_prefill
from tests.kernels.triton.cases import HOPPER_TRAITS, TOLERANCES, every_head_size, paged_case, some_head_sizes

MIXED = [(70, 70), (1, 1), (33, 1), (90, 17), (20, 0), (65, 2)]
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 21},
    "cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 40, "soft_cap": 2.0, "sinks": True},
}


def check(case, options, *, dtype, min_queries=1, rows=slice(None)):
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-1, 2, case.q.shape[1])
    options["scale"] = case.q.shape[2] ** -0.5
    expected = ReferenceBackend().paged_attention(case.q, case.kv, case.batch, **options)
    out = torch.full_like(expected, 7.0)
    paged_attention_prefill(case.q, case.kv, case.batch, out, min_queries=min_queries, **options)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out[rows], expected[rows], atol=atol, rtol=rtol)
    return out


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
    case = paged_case(MIXED, heads=6, kv_heads=2, head_dim=64, dtype=torch.float16)
    check(case, OPTIONS[options], dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 80), (3, 1, 96), (2, 1, 128), (70, 1, 33), (1, 1, 256)]
)
def test_shapes_and_dtypes(heads, kv_heads, head_dim, dtype):
    case = paged_case([(40, 20), (70, 1)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    check(case, {}, dtype=dtype)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quantized(stored, dtype):
    case = paged_case([(70, 9), (18, 1)], heads=4, kv_heads=2, head_dim=64, dtype=dtype, stored=stored)
    check(case, OPTIONS["all"], dtype=dtype)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@every_head_size
def test_all_options_in_every_shape(heads, kv_heads, head_dim, dtype, stored):
    case = paged_case(
        [(90, 21), (18, 1)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, stored=stored
    )
    check(case, OPTIONS["all"], dtype=dtype)


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@some_head_sizes
def test_e4m3_as_hopper_reads_it(heads, kv_heads, head_dim, dtype, options, monkeypatch):
    monkeypatch.setattr(module, "device_traits", lambda _: HOPPER_TRAITS)
    case = paged_case(
        [(90, 21), (18, 1)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        stored=torch.float8_e4m3fn,
    )
    check(case, OPTIONS[options], dtype=dtype)


@pytest.mark.parametrize("transposed", [(False, True), (True, False)])
def test_layouts(transposed):
    case = paged_case([(64, 10), (16, 1)], heads=2, kv_heads=1, head_dim=64, transposed=transposed)
    case.kv.v.nan_to_num_(0)  # transposed V is not masked, so it must hold numbers everywhere
    check(case, {}, dtype=torch.float32)


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_sizes(block_size):
    case = paged_case(MIXED, heads=2, kv_heads=1, head_dim=64, block_size=block_size, dtype=torch.float16)
    check(case, OPTIONS["window"], dtype=torch.float16)


def test_leaves_short_sequences_alone():
    case = paged_case([(40, 3), (50, 1), (20, 0), (9, 2)], heads=2, kv_heads=1, head_dim=64, dtype=torch.float16)
    out = check(case, {}, dtype=torch.float16, min_queries=2, rows=[0, 1, 2, 4, 5])
    assert (out[3] == 7).all()


def test_nan_stays_in_its_sequence():
    case = paged_case([(20, 5), (30, 6)], heads=2, kv_heads=1, head_dim=64, dtype=torch.float16)
    healthy = check(case, {}, dtype=torch.float16)
    case.q[:5] = float("nan")
    out = torch.empty_like(healthy)
    paged_attention_prefill(case.q, case.kv, case.batch, out, scale=0.125)
    assert out[:5].isnan().all()
    assert torch.equal(out[5:], healthy[5:])


@pytest.mark.parametrize(
    ("group", "rows", "expected"), [(1, 128, 1), (3, 128, 3), (71, 128, 71), (20, 16, 10), (17, 16, 1), (32, 32, 32)]
)
def test_heads_together(group, rows, expected):
    assert heads_together(group, rows) == expected
