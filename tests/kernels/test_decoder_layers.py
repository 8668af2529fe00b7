"""A decoder but for its head in one call: the values of the single ops, to the bit."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from octavo_kernels import AttentionBatch, DecoderLayer, DecoderShape, InvalidArgumentError, KVLayout
from octavo_kernels.layers import ComposedLayers
from tests.kernels.cases import DTYPES, ISAS, TOLERANCES, normal

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 48, 80, 6, 2, 16, 8
SHAPE = DecoderShape(HEADS, KV_HEADS, HEAD_DIM, 1e-5, HEAD_DIM**-0.5)
VOCAB = 97
COUNTS = ((1,), (1, 1, 1, 1, 1), (70, 1, 9))


def make_gains(width, dtype, seed):
    return (1 + normal(width, dtype=torch.float32, seed=seed, scale=0.1)).to(dtype)


def prepare(layers, make, dtype=None):
    """Gives a decoder of these layers, by a backend's `decoder_layers` or another that takes the same."""
    norm_dtype = layers[0].input_norm.dtype if layers else torch.float32
    embedding = normal(VOCAB, HIDDEN, dtype=dtype or norm_dtype, seed=9)
    return make(embedding, layers, make_gains(HIDDEN, norm_dtype, 77), SHAPE)


def composed(backend, layers, dtype):
    return prepare(layers, functools.partial(ComposedLayers, backend), dtype)


def make_layers(backend, dtype, *, group="none", has_norms=False, bias=False, window=None, norm_dtype=None):
    """Three layers; group "none" is of dtype, otherwise of 8 bits."""

    def linear(out, inner, seed):
        weight = normal(out, inner, dtype=torch.float32, seed=seed, scale=inner**-0.5)
        biases = normal(out, dtype=torch.float32, seed=seed + 1) if bias else None
        if group == "none":
            return backend.linear(weight.to(dtype), None if biases is None else biases.to(dtype))
        return backend.int8_linear(weight, biases, dtype=dtype, group=group)

    def gains(width, seed):
        return make_gains(width, norm_dtype or dtype, seed)

    return [
        DecoderLayer(
            input_norm=gains(HIDDEN, 10 * index),
            qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, 100 * index),
            q_norm=gains(HEAD_DIM, 10 * index + 1) if has_norms else None,
            k_norm=gains(HEAD_DIM, 10 * index + 2) if has_norms else None,
            output=linear(HIDDEN, HEADS * HEAD_DIM, 100 * index + 2),
            mlp_norm=gains(HIDDEN, 10 * index + 3),
            gate_up=linear(2 * INNER, HIDDEN, 100 * index + 4),
            down=linear(HIDDEN, INNER, 100 * index + 6),
            sliding_window=window if index > 0 else None,
        )
        for index in range(3)
    ]


def make_pass(dtype, counts, past=5, kv_dtype=None):
    """Sequences of counts[i] tokens behind `past` that are in the cache, as random numbers; zeros if quantized."""
    contexts = [past + count for count in counts]
    per = -(-max(contexts) // BLOCK)
    layout = KVLayout(3, KV_HEADS, HEAD_DIM, BLOCK, kv_dtype or dtype)
    shape = layout.pool_shape(per * len(counts))
    pool = torch.zeros(shape, dtype=torch.uint8) if kv_dtype else normal(*shape, dtype=dtype, seed=3)
    tables = torch.arange(per * len(counts), dtype=torch.int32).view(len(counts), per).flip(1)
    positions = torch.cat([torch.arange(past, context) for context in contexts])
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = tables[owners, positions // BLOCK] * BLOCK + positions % BLOCK
    batch = AttentionBatch(
        positions=positions.int(),
        slots=slots.int(),
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        context_lens=torch.tensor(contexts).int(),
        block_tables=tables.contiguous(),
    )
    angles = torch.arange(128.0)[:, None] * 0.5 ** torch.arange(HEAD_DIM / 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    token_ids = torch.randint(VOCAB, (sum(counts),), generator=torch.Generator().manual_seed(5)).int()
    return token_ids, cos_sin, batch, layout, pool


def run(layers, case):
    token_ids, cos_sin, batch, layout, pool = case
    own = pool.clone()
    calls = []
    out = layers(token_ids, batch.positions, cos_sin, batch, layout.layers(own), lambda: calls.append(1))
    assert calls
    return out.clone(), own  # the next call may overwrite it


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"has_norms": True, "bias": True},
        {"window": 4, "norm_dtype": torch.float32},
        {"group": None, "bias": True},
        {"group": 64, "has_norms": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_equals_the_single_ops(native, isa, dtype, options, counts):
    backend = native(isa)
    layers, case = make_layers(backend, dtype, **options), make_pass(dtype, counts)
    out, pool = run(prepare(layers, backend.decoder_layers, dtype), case)
    expected, expected_pool = run(composed(backend, layers, dtype), case)
    assert torch.equal(out, expected)
    assert torch.equal(pool, expected_pool)
    assert not torch.equal(pool, case[-1])


@pytest.mark.parametrize("rows", [(), (0,), (6,), (2, 3, 6), (8, 79, 80, 81, 82), (11, 12, 60, 79), range(83)], ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("window", [None, 7, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_wanted_have_the_bits_they_have_among_all(native, reference, dtype, has_norms, window, rows):
    for backend, is_exact in ((native(), True), (reference, False)):
        layers = make_layers(backend, dtype, has_norms=has_norms, window=window)
        layers = prepare(layers, backend.decoder_layers)
        counts = (1, 2, 3, 1) if max(rows, default=0) < 7 else (1, 2, 5, 72, 3)  # few and many tokens
        case = make_pass(dtype, counts)
        every, pool = run(layers, case)
        wanted = torch.tensor([*rows], dtype=torch.int64)
        out, own_pool = run(lambda *values: layers(*values, wanted), case)  # noqa: B023
        assert out.shape == (len(rows), HIDDEN)
        assert torch.equal(out, every[wanted]) if is_exact else torch.allclose(out, every[wanted])
        assert torch.equal(own_pool, pool)


@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (-1,), (7,)])
def test_rows_that_are_none_are_refused(native, rows):
    layers = prepare(make_layers(native(), torch.float32), native().decoder_layers)
    with pytest.raises(InvalidArgumentError, match=r"rows\[\d\] is -?\d; rows must ascend"):
        run(lambda *values: layers(*values, torch.tensor(rows)), make_pass(torch.float32, (1, 2, 3, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_quantized_k_and_v(native, isa, dtype):
    layers = make_layers(native(isa), dtype, has_norms=True)
    case = make_pass(dtype, (5, 1), kv_dtype=torch.int8)
    out, pool = run(prepare(layers, native(isa).decoder_layers), case)
    expected, expected_pool = run(composed(native(isa), layers, dtype), case)
    assert torch.equal(out, expected)
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(native, reference, dtype):
    case = make_pass(dtype, (9, 1))
    out, _ = run(prepare(make_layers(native(), dtype, has_norms=True), native().decoder_layers), case)
    expected, _ = run(prepare(make_layers(reference, dtype, has_norms=True), reference.decoder_layers), case)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, atol=10 * atol, rtol=10 * rtol)


def test_a_row_has_its_bits_beside_any_others(native):
    layers = prepare(make_layers(native(), torch.bfloat16, group=None), native().decoder_layers)
    token_ids, cos_sin, batch, layout, pool = make_pass(torch.bfloat16, (1,) * 7)
    together, _ = run(layers, (token_ids, cos_sin, batch, layout, pool))
    for index in range(7):
        alone = dataclasses.replace(
            batch,
            positions=batch.positions[index : index + 1],
            slots=batch.slots[index : index + 1],
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=batch.context_lens[index : index + 1],
            block_tables=batch.block_tables[index : index + 1],
        )
        out, _ = run(layers, (token_ids[index : index + 1], cos_sin, alone, layout, pool))
        assert torch.equal(out[0], together[index])


def test_many_tokens_show_progress_layer_by_layer(native):
    layers = prepare(make_layers(native(), torch.float32), native().decoder_layers)
    for counts, expected in (((3,), 1), ((64,), 3)):
        token_ids, cos_sin, batch, layout, pool = make_pass(torch.float32, counts)
        calls = []
        layers(token_ids, batch.positions, cos_sin, batch, layout.layers(pool), lambda calls=calls: calls.append(1))
        assert len(calls) == expected


def test_no_tokens_are_no_work(native):
    layers = prepare(make_layers(native(), torch.float32), native().decoder_layers)
    ids, cos_sin, batch, layout, pool = make_pass(torch.float32, (1,))
    assert layers(ids[:0], batch.positions[:0], cos_sin, batch, layout.layers(pool), lambda: None).shape == (0, HIDDEN)


class TestRefuses:
    """What would be read beyond, or belongs elsewhere."""

    def test_layers(self, native, reference):
        backend = native()
        good = make_layers(backend, torch.float32)
        other = backend.linear(torch.zeros(HIDDEN, HIDDEN))
        for wrong, message in (
            ([], "layers is empty"),
            ([good[0], dataclasses.replace(good[1], down=other)], "down is 48 x 48"),
            ([good[0], dataclasses.replace(good[1], gate_up=other)], "gate_up is 48 x 48"),
            ([dataclasses.replace(good[0], mlp_norm=torch.zeros(3))], "mlp_norm has shape"),
            ([dataclasses.replace(good[0], q_norm=torch.zeros(HEAD_DIM))], "one of q_norm and k_norm"),
            (make_layers(reference, torch.float32), "qkv is a ReferenceLinear"),
            ([good[0], make_layers(backend, torch.bfloat16)[1]], "of torch.bfloat16"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                prepare(wrong, backend.decoder_layers)

    def test_what_stands_on_both_sides(self, native):
        backend = native()
        layers, gains = make_layers(backend, torch.float32), torch.ones(HIDDEN)
        for embedding, norm, message in (
            (torch.zeros(VOCAB, HIDDEN + 1), gains, "embedding has shape"),
            (torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16), gains, "embedding has shape"),
            (torch.zeros(HIDDEN, VOCAB).T, gains, "embedding has shape"),
            (torch.zeros(VOCAB, HIDDEN), gains[1:], "last_norm has shape"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                backend.decoder_layers(embedding, layers, norm, SHAPE)

    def test_batches(self, native):
        layers = prepare(make_layers(native(), torch.float32), native().decoder_layers)
        token_ids, cos_sin, batch, layout, pool = make_pass(torch.float32, (2, 1))
        kv = layout.layers(pool)

        def call(token_ids=token_ids, rotary=None, kv=kv, **columns):
            changed = dataclasses.replace(batch, **columns)
            rotary = changed.positions if rotary is None else rotary
            layers(token_ids, rotary, cos_sin, changed, kv, lambda: None)

        before = pool.clone()
        for message, options in (
            ("token_ids has shape", {"token_ids": token_ids.long()}),
            (r"token_ids\[2\] is 97", {"token_ids": torch.tensor([0, 96, 97], dtype=torch.int32)}),
            (r"token_ids\[0\] is -1", {"token_ids": torch.tensor([-1, 0, 1], dtype=torch.int32)}),
            ("slot 9999", {"slots": torch.tensor([0, 9999, 1], dtype=torch.int32)}),
            ("position 500", {"rotary": torch.tensor([0, 1, 500], dtype=torch.int32)}),
            ("block 77", {"block_tables": batch.block_tables * 0 + 77}),
            ("query_starts", {"query_starts": torch.tensor([0, 2, 4], dtype=torch.int32)}),
            ("kv_layers are 2", {"kv": kv[:2]}),
            (
                "kv_layers are 3",
                {"kv": KVLayout(3, KV_HEADS, 8, BLOCK, torch.float32).layers(torch.zeros(2, 3, 2, 2, 64))},
            ),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                call(**options)
        assert torch.equal(pool, before)
        call()
        assert not torch.equal(pool, before)
