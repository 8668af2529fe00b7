from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, KVLayout
from octavo_worker.batch import build_batch
from octavo_worker.devices import open_device
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.gguf import QUANT_TYPES
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from octavo_worker.sequences import SequenceTable
from tests.worker.cases import MODEL_CASES, PROMPT, gguf_case, plain_vocabulary
from tests.worker.checkpoints import (
    gguf_metadata,
    gguf_tensors,
    tiny_config,
    tiny_weights,
    write_checkpoint,
    write_gguf,
)
from tests.worker.conftest import load_decoder

LOGITS = np.load(Path(__file__).parents[1] / "data" / "logits.npz")


def logits_in_chunks(decoder: Decoder, backend: Backend, chunk: int, block_size: int = 8) -> torch.Tensor:
    """Logits of every token of PROMPT, computed in chunks over scattered blocks."""
    config = decoder.config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, decoder.dtype)
    kv_layers = layout.layers(torch.zeros(layout.pool_shape(20), dtype=decoder.dtype))
    blocks = np.arange(19, -1, -1, dtype=np.int32)[: -(-len(PROMPT) // block_size)]
    table = SequenceTable(1)
    row = np.array([table.put(1, np.array(PROMPT, np.int32), blocks, len(PROMPT), pb.SequenceParams())])
    parts = []
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        batch = build_batch(
            table,
            row,
            np.array([start]),
            np.array([count]),
            block_size=block_size,
            upload=open_device(backend.device).upload,
            with_prompt_lens=True,
        )
        parts.append(
            decoder.forward(
                batch.token_ids, batch.attention, kv_layers, torch.arange(count), prompt_lens=batch.prompt_lens
            )
        )
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("name", MODEL_CASES)
def test_logits_equal_those_of_transformers(name: str, chunk: int, backend: Backend, tmp_path: Path) -> None:
    """Odd head sizes failed, some only in chunks (BR-114); windows saw wrong keys in chunks (BR-116).

    Kinds of scaling were taken for none under the other key, or beyond the original length (BR-115).
    """
    folder = write_checkpoint(tmp_path, MODEL_CASES[name])
    decoder = load_decoder(open_checkpoint(find_model(str(folder))), backend)
    logits = logits_in_chunks(decoder, backend, chunk)
    assert np.abs(logits[-2:].numpy() - LOGITS[name]).max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_of_a_gguf_file_equal_those_of_safetensors(family: str, backend: Backend, tmp_path: Path) -> None:
    config = gguf_case(family)
    metadata = gguf_metadata(config) | plain_vocabulary(config["vocab_size"])
    path = write_gguf(tmp_path / "model.gguf", metadata, gguf_tensors(config, tiny_weights(config)))
    decoder = load_decoder(open_checkpoint(find_model(str(path))), backend)
    logits = logits_in_chunks(decoder, backend, chunk=512)
    assert np.abs(logits[-2:].numpy() - LOGITS[f"gguf-{family}"]).max() < 1e-4


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("chunk", [1, 33, 512])
def test_chunks_and_block_sizes_do_not_matter(decoder: Decoder, backend: Backend, chunk: int, block_size: int) -> None:
    expected = logits_in_chunks(decoder, backend, chunk=512)
    logits = logits_in_chunks(decoder, backend, chunk, block_size)
    if backend.row_invariant:
        assert torch.equal(logits, expected)
    else:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [1, 2, 8, 14], ids=lambda kind: QUANT_TYPES[kind].name)
def test_tied_embeddings_of_any_type_are_read(kind: int, backend: Backend, tmp_path: Path) -> None:
    """The type of the embeddings was taken for granted (BR-112): logits are those of the dequantized values."""
    config = tiny_config(hidden_size=256, tie_word_embeddings=True)
    name, shape = "model.embed_tokens.weight", (config["vocab_size"], 256)
    blocks = np.load(Path(__file__).parents[1] / "data" / "gguf_blocks.npz")
    size, type_name = shape[0] * shape[1], QUANT_TYPES[kind].name
    values, content = blocks[f"{type_name}.values"], blocks[f"{type_name}.bytes"]
    repeats = size // len(values)
    rest = size - repeats * len(values)
    rest_bytes = rest // QUANT_TYPES[kind].block_elements * QUANT_TYPES[kind].block_bytes
    weights = tiny_weights(config) | {name: np.concatenate([np.tile(values, repeats), values[:rest]]).reshape(shape)}
    raw = {
        "token_embd.weight": (shape, kind, np.concatenate([np.tile(content, repeats), content[:rest_bytes]]).tobytes())
    }
    metadata = gguf_metadata(config) | plain_vocabulary(config["vocab_size"])
    tensors = gguf_tensors(config, weights)
    plain = write_gguf(tmp_path / "plain.gguf", metadata, tensors)
    typed = write_gguf(tmp_path / "typed.gguf", metadata, tensors, raw=raw)
    expected, logits = (
        logits_in_chunks(load_decoder(open_checkpoint(find_model(str(path))), backend), backend, chunk=512)
        for path in (plain, typed)
    )
    assert expected.isfinite().all()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype, backend: Backend, tmp_path: Path) -> None:
    """Some dtypes ran on no CPU, or not with a checkpoint's own (BR-109)."""
    folder = write_checkpoint(tmp_path, tiny_config())
    decoder = load_decoder(open_checkpoint(find_model(str(folder))), backend, dtype)
    logits = logits_in_chunks(decoder, backend, chunk=512)
    assert logits.dtype == torch.float32
    assert np.abs(logits[-2:].numpy() - LOGITS["llama"]).max() < 0.2


def test_padded_rows_of_the_head_are_not_computed(backend: Backend, tmp_path: Path) -> None:
    """Padded ids were sampled (BR-117)."""
    config = tiny_config()
    folder = write_checkpoint(tmp_path, config, tokenizer_size=90)
    decoder = load_decoder(open_checkpoint(find_model(str(folder))), backend)
    logits = logits_in_chunks(decoder, backend, chunk=512)
    assert logits.shape == (80, 90)
    assert np.abs(logits[-2:].numpy() - LOGITS["llama"][:, :90]).max() < 1e-4


def test_tied_head_is_used_with_and_without_lm_head_in_the_file(backend: Backend, tmp_path: Path) -> None:
    """One of the two was a KeyError (BR-107)."""
    config = tiny_config(tie_word_embeddings=True)
    weights = tiny_weights(config)
    stray = weights | {"lm_head.weight": np.ones_like(weights["model.embed_tokens.weight"])}
    for name, tensors in (("without", weights), ("with", stray)):
        folder = write_checkpoint(tmp_path / name, config, weights=tensors)
        decoder = load_decoder(open_checkpoint(find_model(str(folder))), backend)
        logits = logits_in_chunks(decoder, backend, chunk=512)
        assert np.abs(logits[-2:].numpy() - LOGITS["llama-tied"]).max() < 1e-4


def test_progress_is_told_after_each_layer(decoder: Decoder, backend: Backend) -> None:
    table = SequenceTable(1)
    layout = KVLayout(2, 2, 8, 8, torch.float32)
    row = np.array([table.put(1, np.array([5], np.int32), np.array([0], np.int32), 1, pb.SequenceParams())])
    upload = open_device(backend.device).upload
    batch = build_batch(table, row, np.array([0]), np.array([1]), block_size=8, upload=upload)
    calls: list[int] = []
    decoder.forward(
        batch.token_ids,
        batch.attention,
        layout.layers(torch.zeros(layout.pool_shape(1))),
        torch.tensor([0]),
        on_progress=lambda: calls.append(1),
    )
    assert len(calls) == 2
    assert decoder.num_parameters == sum(values.size for values in tiny_weights(tiny_config()).values())
