"""K and V of 8 bits: the pool's bytes, what is written, and attention over it against the oracle and bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch

from octavo_kernels import AttentionBatch, InvalidArgumentError, KVLayout, LayerKV
from octavo_kernels.reference import ReferenceBackend
from tests.kernels.cases import DTYPES, ISAS, TOLERANCES, Sequence, normal, paged, spoiled_pool

HEADS = [(9, 3, 64), (4, 4, 80), (12, 2, 96), (8, 2, 100), (4, 1, 8), (5, 1, 20), (2, 1, 256), (6, 3, 33), (10, 1, 128)]
MIXED = [Sequence(70, 70), Sequence(1), Sequence(33), Sequence(400, 17), Sequence(129)]
SMALL = {"heads": 6, "kv_heads": 2, "head_dim": 40, "kv_dtype": torch.int8}
# Queries and the weights of V are rounded to 16 bits, which shows where results are of fp32.
CLOSE = {**TOLERANCES, torch.float32: (2e-4, 2e-4)}


def test_layout_in_bytes():
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.int8)
    assert layout.pool_shape(5) == (5, 30, 2, 3, 16 * 64 + 16 * 4)
    assert layout.pool_dtype is torch.uint8
    assert layout.bytes_per_block == 30 * 2 * 3 * (1024 + 64) == 195_840
    pool = torch.zeros(layout.pool_shape(5), dtype=torch.uint8)
    kv = layout.layers(pool)[7]
    kv.k[2, 1, 63, 15], kv.v[2, 1, 15, 63] = -3, 5
    kv.k_scales[2, 1, 15], kv.v_scales[2, 1, 0] = 1.0, 2.0
    k_tile, v_tile = pool[2, 7, 0, 1], pool[2, 7, 1, 1]
    assert k_tile.tolist() == [0] * 1023 + [253] + [0] * 60 + [0, 0, 0x80, 0x3F]
    assert v_tile.tolist() == [0] * 1023 + [5] + [0, 0, 0, 0x40] + [0] * 60
    assert pool.count_nonzero() == 5


def test_layout_of_floats_has_no_scales():
    layout = KVLayout(2, 1, 8, 16, torch.bfloat16)
    kv = layout.layer(torch.zeros(layout.pool_shape(3), dtype=layout.pool_dtype), 1)
    assert not layout.is_quantized
    assert (kv.k_scales, kv.v_scales) == (None, None)


def written(backend, layout, k, v, slots):
    """A pool of zeros with these tokens in its layer 1."""
    pool = torch.zeros(layout.pool_shape(5), dtype=layout.pool_dtype)
    backend.write_kv(k, v, layout.layer(pool, 1), slots)
    return pool


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 20), (16, 64), (32, 33)])
def test_writes_the_same_bytes_as_the_reference(native, reference, isa, dtype, block_size, head_dim):
    layout = KVLayout(3, 2, head_dim, block_size, torch.int8)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(1))[:33].int()
    qkv = normal(33, 6 * head_dim, dtype=dtype, seed=2)
    k, v = (part.unflatten(1, (2, head_dim)) for part in qkv[:, 2 * head_dim :].chunk(2, dim=1))
    k[3], v[4, 1], k[5, 0, 7], v[6, 1, 2], k[7] = 0.0, 1e-38, float("nan"), -float("inf"), k[7] * 1e4
    pool = written(reference, layout, k, v, slots)
    assert torch.equal(written(native(isa), layout, k, v, slots), pool)
    assert pool[:, ::2].count_nonzero() == 0


def test_scale_is_the_largest_magnitude_over_127(reference):
    layout = KVLayout(2, 1, 8, 8, torch.int8)
    k = torch.tensor([[[-254.0, 127.0, 2.0, 1.0, 3.0, 0.9, -5.0, 0.0]]])
    v = torch.tensor([[[float("inf")] + [1.0] * 7]])
    kv = layout.layer(written(reference, layout, k, v, torch.tensor([11]).int()), 1)
    assert kv.k_scales[1, 0, 3] == 2.0
    assert kv.k[1, 0, :, 3].tolist() == [-127, 64, 1, 0, 2, 0, -2, 0]  # halves go to the even neighbour
    assert kv.v_scales[1, 0, 3].isnan()
    assert kv.v[1, 0, 3].tolist() == [0] * 8


@functools.cache
def oracle(heads, kv_heads, head_dim, dtype, window, block_size=16):
    """A mixed batch and what it should give; made once for all instruction sets."""
    reference = ReferenceBackend()
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    case = paged(reference, MIXED, **shape, dtype=dtype, kv_dtype=torch.int8)
    options = {"scale": head_dim**-0.5, "sliding_window": window}
    return case, options, reference.paged_attention(case.q, case.kv, case.batch, **options)


@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_matches_reference(native, isa, dtype, heads, kv_heads, head_dim, window):
    case, options, expected = oracle(heads, kv_heads, head_dim, dtype, window)
    atol, rtol = CLOSE[dtype]
    out = native(isa).paged_attention(case.q, case.kv, case.batch, **options)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


def test_reference_counts_stored_values_times_scales(reference):
    """Against attention over the dequantized K and V as floats."""
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 40, "block_size": 16, "dtype": torch.float32}
    case = paged(reference, MIXED, **shape, kv_dtype=torch.int8)
    k, v = case.kv.k * case.kv.k_scales[:, :, None], case.kv.v * case.kv.v_scales[..., None]
    out = reference.paged_attention(case.q, case.kv, case.batch, scale=0.2)
    expected = reference.paged_attention(case.q, LayerKV(k, v), case.batch, scale=0.2)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    exact = paged(reference, MIXED, **shape)
    unquantized = reference.paged_attention(exact.q, exact.kv, exact.batch, scale=0.2)
    assert 1e-4 < (out - unquantized).abs().max() < 0.05


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 21, 130])
def test_a_token_has_its_own_bits(native, isa, dtype, window):
    backend = native(isa)
    options = {"scale": 0.15, "sliding_window": window}

    def run(sequences, block_size=16):
        case = paged(backend, sequences, **SMALL, block_size=block_size, dtype=dtype)
        return backend.paged_attention(case.q, case.kv, case.batch, **options)

    whole = run([Sequence(290, 290)])
    for block_size in (8, 24, 32):
        assert torch.equal(run([Sequence(290, 290)], block_size), whole), block_size
    for chunk in (1, 2, 7, 16, 33):
        for end in range(chunk, 291, 11 * chunk):
            part = run([Sequence(end, chunk)], 8 if chunk % 2 else 16)
            assert torch.equal(part, whole[end - chunk : end]), (chunk, end)
    beside = run([Sequence(290, 40), Sequence(90, 90), Sequence(1), Sequence(17)])
    assert torch.equal(beside[:40], whole[250:])


def test_sums_are_the_same_on_every_instruction_set(native):
    """Scores and values are exact integers: what differs is the exponential, where multiply-add is not fused."""
    case, options, _ = oracle(9, 3, 64, torch.float32, None)
    results = []
    for isa in ISAS[:-1]:
        try:
            results.append(native(isa).paged_attention(case.q, case.kv, case.batch, **options))
        except pytest.skip.Exception:
            continue
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_counts_agree(native, dtype):
    results = []
    for threads in (1, 2, 5):
        backend = native(num_threads=threads)
        case = paged(backend, MIXED, **SMALL, block_size=16, dtype=dtype)
        results.append(backend.paged_attention(case.q, case.kv, case.batch, scale=0.2))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", ISAS)
def test_a_long_tail_of_small_weights_counts(native, isa):
    """One position outweighs each other one 100,000 times; all but a few of the 4,000 others count."""
    layout = KVLayout(2, 1, 16, 16, torch.int8)
    k, v, q = torch.zeros(4001, 1, 16), torch.ones(4001, 1, 16), torch.zeros(1, 1, 16)
    q[..., 0], k[300, 0, 0], v[300] = 1.0, 11.512925, -1.0
    pool = spoiled_pool(layout, 251)
    kv = layout.layer(pool, 1)
    positions = torch.arange(4001).int()
    backend = native(isa)
    backend.write_kv(k, v, kv, positions)
    batch = AttentionBatch(
        positions[-1:],
        positions[-1:],
        torch.tensor([0, 1]).int(),
        torch.tensor([4001]).int(),
        torch.arange(251)[None].int(),
    )
    out = backend.paged_attention(q, kv, batch, scale=1.0)
    # In the one block of 128 positions that the large weight stands in, the others round to 0.
    tail = (4000 - 127) * 1e-5
    torch.testing.assert_close(out, torch.full((1, 16), (tail - 1) / (0.04 + 1)), atol=0, rtol=2e-4)


@pytest.mark.parametrize("backend_name", ["native", "reference"])
@pytest.mark.parametrize("spoil", ["q", "k", "v"])
def test_nan_stays_in_its_sequence(native, reference, backend_name, spoil):
    backend = native() if backend_name == "native" else reference
    case = paged(backend, [Sequence(20, 2), Sequence(30, 3)], **SMALL, block_size=16, dtype=torch.float32)
    healthy = backend.paged_attention(case.q, case.kv, case.batch, scale=0.2)
    if spoil == "q":
        case.q[:2] = float("nan")
    else:
        tokens = torch.full((1, 2, 40), float("nan"))
        ordinary = torch.ones(1, 2, 40)
        slot = case.batch.block_tables[0, :1] * 16 + 7
        backend.write_kv(*((tokens, ordinary) if spoil == "k" else (ordinary, tokens)), case.kv, slot)
    out = backend.paged_attention(case.q, case.kv, case.batch, scale=0.2)
    assert out[:2].isnan().all()
    assert torch.equal(out[2:], healthy[2:])


def test_strided_queries(native, reference):
    case = paged(reference, [Sequence(40, 40)], **SMALL, block_size=16, dtype=torch.bfloat16)
    wide = torch.zeros(40, 500, dtype=torch.bfloat16)
    wide[:, 100:340] = case.q.flatten(1)
    q = wide[:, 100:340].unflatten(1, (6, 40))
    backend = native()
    out = backend.paged_attention(q, case.kv, case.batch, scale=0.2)
    assert torch.equal(out, backend.paged_attention(case.q, case.kv, case.batch, scale=0.2))


def test_blocks_are_copied_and_moved_with_their_scales(native, reference):
    layout = KVLayout(2, 2, 20, 16, torch.int8)
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(0, 256, layout.pool_shape(9), dtype=torch.uint8, generator=generator)
    for backend in (native(), reference):
        pool = source.clone()
        backend.copy_blocks(pool, torch.tensor([1, 8]), torch.tensor([0, 2]))
        assert torch.equal(pool, source[[1, 1, 8, 3, 4, 5, 6, 7, 8]])
        target = torch.zeros(layout.pool_shape(2), dtype=torch.uint8)
        backend.move_blocks(source, torch.tensor([7]), target, torch.tensor([1]))
        assert torch.equal(target[1], source[7])


def test_refuses_what_does_not_fit(native):
    backend, layout = native(), KVLayout(1, 2, 8, 16, torch.int8)
    kv = layout.layer(torch.zeros(layout.pool_shape(2), dtype=torch.uint8), 0)
    ones, slot = torch.ones(1, 2, 8), torch.tensor([0]).int()
    with pytest.raises(InvalidArgumentError, match="k has dtype"):
        backend.write_kv(ones.double(), ones.double(), kv, slot)
    with pytest.raises(InvalidArgumentError, match="v has shape"):
        backend.write_kv(ones, ones.bfloat16(), kv, slot)
    with pytest.raises(InvalidArgumentError, match="right behind their tiles"):
        backend.write_kv(ones, ones, LayerKV(kv.k, kv.v, kv.v_scales, kv.k_scales), slot)
    with pytest.raises(InvalidArgumentError, match="v_scales does not fit"):
        backend.write_kv(ones, ones, LayerKV(kv.k, kv.v, kv.k_scales, None), slot)
    wide = KVLayout(1, 1, 520, 8, torch.int8)
    wide_kv = wide.layer(torch.zeros(wide.pool_shape(1), dtype=torch.uint8), 0)
    with pytest.raises(InvalidArgumentError, match="head_dim is 520"):
        backend.write_kv(torch.ones(1, 1, 520), torch.ones(1, 1, 520), wide_kv, slot)
