"""Paged attention: against the oracle, and bit for bit whatever the block size, the chunk and the neighbours."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from octavo_kernels import AttentionBatch, InvalidArgumentError, KVLayout
from octavo_kernels.reference import ReferenceBackend
from tests.kernels.cases import DTYPES, ISAS, TOLERANCES, Sequence, normal, paged

HEADS = [(9, 3, 64), (4, 4, 80), (8, 2, 100), (4, 1, 8), (5, 1, 20), (2, 1, 256), (6, 3, 33), (10, 1, 128)]
MIXED = [Sequence(70, 70), Sequence(1), Sequence(33), Sequence(200, 17), Sequence(129)]
SMALL = {"heads": 6, "kv_heads": 2, "head_dim": 40}


@functools.cache
def oracle(heads, kv_heads, head_dim, dtype, window):
    """A mixed batch and what it should give; made once for all instruction sets."""
    reference = ReferenceBackend()
    case = paged(reference, MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=dtype)
    options = {"scale": head_dim**-0.5, "sliding_window": window}
    return case, options, reference.paged_attention(case.q, case.kv, case.batch, **options)


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_matches_reference(native, isa, dtype, heads, kv_heads, head_dim, window):
    case, options, expected = oracle(heads, kv_heads, head_dim, dtype, window)
    atol, rtol = TOLERANCES[dtype]
    out = native(isa).paged_attention(case.q, case.kv, case.batch, **options)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


def dense(q, k, v, scale, window):
    """Textbook attention of the last len(q) tokens of one sequence, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    rows = []
    for i in range(len(q)):
        p = len(k) - len(q) + i
        first = 0 if window is None else max(0, p - window + 1)
        weights = (torch.einsum("hd,chd->hc", q[i], k[first : p + 1]) * scale).softmax(-1)
        rows.append(torch.einsum("hc,chd->hd", weights, v[first : p + 1]).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 5])
def test_both_backends_match_the_textbook(native, reference, window):
    layout = KVLayout(1, 2, 24, 8, torch.float32)
    pool = torch.zeros(layout.pool_shape(6))
    kv = layout.layer(pool, 0)
    q, k, v = (normal(37, h, 24, dtype=torch.float32, seed=h + i) for i, h in enumerate((4, 2, 2)))
    ids = torch.tensor([3, 0, 5, 1, 4])
    slots = torch.tensor([int(ids[p // 8]) * 8 + p % 8 for p in range(37)]).int()
    positions = torch.arange(17, 37).int()
    batch = AttentionBatch(
        positions, slots[17:], torch.tensor([0, 20]).int(), torch.tensor([37]).int(), ids[None].int()
    )
    expected = dense(q[17:], k, v, 0.2, window).float()
    for backend in (native(), reference):
        pool.zero_()
        backend.write_kv(k, v, kv, slots)
        out = backend.paged_attention(q[17:], kv, batch, scale=0.2, sliding_window=window)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 21])
def test_a_token_has_its_own_bits(native, isa, dtype, window):
    backend = native(isa)
    options = {"scale": 0.15, "sliding_window": window}

    def run(sequences, block_size=16, **changes):
        case = paged(backend, sequences, **SMALL, block_size=block_size, dtype=dtype)
        return backend.paged_attention(case.q, case.kv, case.batch, **options)

    whole = run([Sequence(150, 150)])
    for block_size in (8, 24, 32):
        assert torch.equal(run([Sequence(150, 150)], block_size), whole), block_size
    for chunk in (1, 2, 7, 16, 33):
        for end in range(chunk, 151, 3 * chunk):
            part = run([Sequence(end, chunk)], 8 if chunk % 2 else 16)
            assert torch.equal(part, whole[end - chunk : end]), (chunk, end)
    beside = run([Sequence(150, 40), Sequence(90, 90), Sequence(1), Sequence(17)])
    assert torch.equal(beside[:40], whole[110:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_counts_agree(native, dtype):
    results = []
    for threads in (1, 2, 5):
        backend = native(num_threads=threads)
        case = paged(backend, MIXED, **SMALL, block_size=16, dtype=dtype)
        results.append(backend.paged_attention(case.q, case.kv, case.batch, scale=0.2))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_and_strided_queries(native, reference, dtype):
    backend = native()
    case = paged(reference, [Sequence(40, 40)], **SMALL, block_size=16, dtype=dtype)
    wide = torch.zeros(40, 500, dtype=dtype)
    wide[:, 100:340] = case.q.flatten(1) * 30
    q = wide[:, 100:340].unflatten(1, (6, 40))
    atol, rtol = TOLERANCES[dtype]
    out = backend.paged_attention(q, case.kv, case.batch, scale=1.0)
    torch.testing.assert_close(out, reference.paged_attention(q, case.kv, case.batch, scale=1.0), atol=atol, rtol=rtol)


@pytest.mark.parametrize("backend_name", ["native", "reference"])
def test_nan_stays_in_its_sequence(native, reference, backend_name):
    backend = native() if backend_name == "native" else reference
    case = paged(backend, [Sequence(20, 2), Sequence(30, 3)], **SMALL, block_size=16, dtype=torch.float32)
    healthy = backend.paged_attention(case.q, case.kv, case.batch, scale=0.2)
    case.q[:2] = float("nan")
    out = backend.paged_attention(case.q, case.kv, case.batch, scale=0.2)
    assert out[:2].isnan().all()
    assert torch.equal(out[2:], healthy[2:])


def test_sequences_without_tokens(native, reference):
    case = paged(reference, [Sequence(20, 2), Sequence(30, 3)], **SMALL, block_size=16, dtype=torch.float32)
    b = case.batch
    padded = AttentionBatch(
        b.positions,
        b.slots,
        torch.tensor([0, 2, 2, 5]).int(),
        torch.tensor([20, 5, 30]).int(),
        torch.stack((b.block_tables[0], torch.zeros(2).int(), b.block_tables[1])),
    )
    for backend in (native(), reference):
        assert torch.equal(
            backend.paged_attention(case.q, case.kv, padded, scale=0.2),
            backend.paged_attention(case.q, case.kv, b, scale=0.2),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": torch.tensor([[0, 99]]).int()}, "block 99 of sequence 0"),
        ({"block_tables": torch.tensor([[0]]).int()}, "holds 1 blocks"),
        ({"positions": torch.tensor([18, 20]).int()}, "position 20 of sequence 0"),
        ({"positions": torch.tensor([18, 18]).int()}, "position 18 of sequence 0"),
        ({"query_starts": torch.tensor([0, 3]).int()}, "query_starts goes from 0 to 3"),
        ({"context_lens": torch.tensor([20])}, "context_lens"),
    ],
)
def test_refuses_a_wrong_batch(native, change, message):
    backend = native()
    case = paged(backend, [Sequence(20, 2)], **SMALL, block_size=16, dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match=message):
        backend.paged_attention(case.q, case.kv, dataclasses.replace(case.batch, **change), scale=0.2)


def test_refuses_wrong_queries(native):
    backend = native()
    case = paged(backend, [Sequence(20, 2)], **SMALL, block_size=16, dtype=torch.float32)
    with pytest.raises(InvalidArgumentError, match="q has shape"):
        backend.paged_attention(case.q[:, :5], case.kv, case.batch, scale=0.2)
    with pytest.raises(InvalidArgumentError, match="sliding_window is 0"):
        backend.paged_attention(case.q, case.kv, case.batch, scale=0.2, sliding_window=0)


def test_soft_cap_and_sinks_match_the_textbook(reference):
    heads, sinks = 6, torch.linspace(-1, 2, 6)
    case = paged(reference, [Sequence(37, 20)], **SMALL, block_size=16, dtype=torch.float32)
    blocks = case.batch.block_tables[0].long()
    k = case.kv.k[blocks].permute(0, 3, 1, 2).flatten(0, 1)[:37].repeat_interleave(3, dim=1).double()
    v = case.kv.v[blocks].permute(0, 2, 1, 3).flatten(0, 1)[:37].repeat_interleave(3, dim=1).double()
    expected = []
    for i, p in enumerate(range(17, 37)):
        scores = torch.einsum("hd,chd->hc", case.q[i].double(), k[: p + 1]) * 0.3
        weights = (2.5 * (scores / 2.5).tanh()).exp()
        weights = weights / (weights.sum(-1) + sinks.double().exp())[:, None]
        expected.append(torch.einsum("hc,chd->hd", weights, v[: p + 1]).flatten())
    out = reference.paged_attention(case.q, case.kv, case.batch, scale=0.3, soft_cap=2.5, sinks=sinks)
    assert out.shape == (20, heads * 40)
    torch.testing.assert_close(out, torch.stack(expected).float(), atol=1e-5, rtol=1e-5)


def test_refuses_soft_caps_and_sinks(native, reference):
    case = paged(reference, [Sequence(20, 2)], **SMALL, block_size=16, dtype=torch.float32)
    for options, message in (({"soft_cap": 0.0}, "soft_cap is 0.0"), ({"sinks": torch.zeros(5)}, "sinks has shape")):
        with pytest.raises(InvalidArgumentError, match=message):
            reference.paged_attention(case.q, case.kv, case.batch, scale=0.2, **options)
    for options, message in (({"soft_cap": 30.0}, "with soft_cap"), ({"sinks": torch.zeros(6)}, "with sinks")):
        with pytest.raises(InvalidArgumentError, match=message):
            native().paged_attention(case.q, case.kv, case.batch, scale=0.2, **options)
