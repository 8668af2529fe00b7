"""Decode attention against the oracle: head sizes, groups, parts, options, dtypes, layouts."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels.reference import ReferenceBackend
from octavo_kernels.triton import paged_attention_decode as module
from octavo_kernels.triton.paged_attention_decode import (
    decode_workspace_size,
    paged_attention_decode,
    part_count,
)
from tests.kernels.triton.cases import HOPPER_TRAITS, TOLERANCES, every_head_size, paged_case, some_head_sizes

DECODES = [(70, 1), (1, 1), (33, 1), (129, 1)]
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 37},
    "cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 70, "soft_cap": 2.0, "sinks": True},
}


def check(case, options, *, dtype, parts, rows=slice(None), workspace=None):
    options = dict(options)
    heads = case.q.shape[1]
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-1, 2, heads)
    options["scale"] = case.q.shape[2] ** -0.5
    expected = ReferenceBackend().paged_attention(case.q, case.kv, case.batch, **options)
    out = torch.full_like(expected, 7.0)
    paged_attention_decode(case.q, case.kv, case.batch, out, parts=parts, workspace=workspace, **options)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out[rows], expected[rows], atol=atol, rtol=rtol)
    return out


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, parts):
    case = paged_case(DECODES, heads=6, kv_heads=2, head_dim=64)
    check(case, OPTIONS[options], dtype=torch.float32, parts=parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 80), (9, 1, 96), (4, 2, 128), (40, 1, 33), (2, 1, 256)]
)
def test_shapes_and_dtypes(heads, kv_heads, head_dim, dtype):
    case = paged_case([(70, 1), (18, 1)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    check(case, {}, dtype=dtype, parts=2)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quantized(stored, dtype):
    case = paged_case([(70, 1), (18, 1)], heads=4, kv_heads=2, head_dim=64, dtype=dtype, stored=stored)
    check(case, OPTIONS["all"], dtype=dtype, parts=2)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@every_head_size
def test_all_options_in_every_shape(heads, kv_heads, head_dim, dtype, stored):
    case = paged_case(
        [(130, 1), (18, 1)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, stored=stored
    )
    check(case, OPTIONS["all"], dtype=dtype, parts=2)


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@some_head_sizes
def test_e4m3_as_hopper_reads_it(heads, kv_heads, head_dim, dtype, options, monkeypatch):
    monkeypatch.setattr(module, "device_traits", lambda _: HOPPER_TRAITS)
    case = paged_case(
        [(130, 1), (18, 1)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        stored=torch.float8_e4m3fn,
    )
    check(case, OPTIONS[options], dtype=dtype, parts=2)


@pytest.mark.parametrize("transposed", [(False, True), (True, False), (True, True)])
def test_layouts(transposed):
    # Transposed V is not masked, so it must hold numbers everywhere.
    case = paged_case([(64, 1), (16, 1)], heads=2, kv_heads=1, head_dim=64, transposed=transposed)
    case.kv.v.nan_to_num_(0)
    check(case, {}, dtype=torch.float32, parts=2)


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_sizes(block_size):
    case = paged_case(DECODES, heads=4, kv_heads=2, head_dim=64, block_size=block_size)
    check(case, OPTIONS["window"], dtype=torch.float32, parts=2)


def test_leaves_other_sequences_alone():
    case = paged_case([(40, 3), (50, 1), (20, 0), (9, 1)], heads=2, kv_heads=1, head_dim=64)
    out = check(case, {}, dtype=torch.float32, parts=1, rows=slice(3, 5))
    assert (out[:3] == 7).all()


def test_more_parts_than_tiles_and_a_workspace_of_ones_own():
    case = paged_case([(300, 1), (5, 1)], heads=4, kv_heads=2, head_dim=64)
    size = decode_workspace_size(2, 4, 64, 20)
    assert size == 2 * 4 * 20 * 66
    check(case, {}, dtype=torch.float32, parts=20, workspace=torch.full((size + 5,), float("nan")))


def test_large_scores_and_strided_queries():
    case = paged_case([(90, 1)], heads=4, kv_heads=2, head_dim=64)
    wide = torch.zeros(1, 500)
    wide[:, 100:356] = case.q.flatten(1) * 30
    check(type(case)(wide[:, 100:356].unflatten(1, (4, 64)), case.kv, case.batch), {}, dtype=torch.float32, parts=2)


def test_nan_stays_in_its_sequence():
    case = paged_case([(20, 1), (30, 1)], heads=2, kv_heads=1, head_dim=64)
    healthy = check(case, {}, dtype=torch.float32, parts=2)
    case.q[0] = float("nan")
    out = torch.empty_like(healthy)
    paged_attention_decode(case.q, case.kv, case.batch, out, scale=0.125, parts=2)
    assert out[0].isnan().all()
    assert torch.equal(out[1], healthy[1])


@pytest.mark.parametrize(
    ("programs", "max_context", "expected"),
    [(8, 8192, 64), (8, 131072, 132), (512, 8192, 3), (2048, 8192, 1), (8, 100, 1), (0, 8192, 64)],
)
def test_part_count(programs, max_context, expected):
    assert part_count(programs, num_sms=132, max_context=max_context, block_n=64) == expected
