from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo_kernels import Backend, BackendUnavailableError, load_backend
from octavo_kernels.int4 import Int4Weight
from octavo_kernels.reference import ReferenceBackend
from octavo_kernels.reference_linear import ReferenceInt4Linear, ReferenceInt8Linear, ReferenceLinear
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from octavo_worker.models.layers import QUANTIZATIONS, Quantization
from tests.worker.cases import MODEL_CASES, plain_vocabulary
from tests.worker.checkpoints import (
    gguf_metadata,
    gguf_tensors,
    tiny_config,
    tiny_weights,
    write_checkpoint,
    write_gguf,
)
from tests.worker.conftest import load_decoder
from tests.worker.models.test_decoder import logits_in_chunks

# Biases everywhere, norms of queries and keys, tied and untied heads.
CASES = ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3"]


class WideBackend(ReferenceBackend):
    """Computes what should be 8 bits in fp32: what is left is the rotation."""

    def int8_linear(  # type: ignore[override]
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        group: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> ReferenceLinear:
        assert dtype is torch.float32
        return self.linear(weight, bias, out_dtype=out_dtype)


def decoder_of(
    name: str, folder: Path, backend: Backend, quantization: Quantization, dtype: torch.dtype = torch.float32
) -> Decoder:
    checkpoint = open_checkpoint(find_model(str(write_checkpoint(folder, MODEL_CASES[name]))))
    num_sampled = checkpoint.tokenizer.size
    return Decoder(
        checkpoint.config, checkpoint.weights, backend, dtype, num_sampled=num_sampled, quantization=quantization
    )


@pytest.mark.parametrize("name", CASES)
def test_rotation_changes_nothing(name: str, tmp_path: Path) -> None:
    expected = logits_in_chunks(decoder_of(name, tmp_path / "a", ReferenceBackend(), "none"), ReferenceBackend(), 33)
    rotated = decoder_of(name, tmp_path / "b", WideBackend(), "int8")
    torch.testing.assert_close(logits_in_chunks(rotated, WideBackend(), 33), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("fp8", 0.3), ("int4", 0.5)])
@pytest.mark.parametrize("name", CASES)
def test_quantized_is_close(name: str, quantization: Quantization, most: float, tmp_path: Path) -> None:
    backend = ReferenceBackend()
    expected = logits_in_chunks(decoder_of(name, tmp_path / "a", backend, "none"), backend, 33)
    logits = logits_in_chunks(decoder_of(name, tmp_path / "b", backend, quantization), backend, 33)
    assert 0 < (logits - expected).norm() / expected.norm() < most


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_native_kernels_give_the_same(
    name: str, dtype: torch.dtype, quantization: Quantization, tmp_path: Path
) -> None:
    try:
        native = load_backend("cpu", num_threads=2)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    reference = ReferenceBackend()
    expected = logits_in_chunks(decoder_of(name, tmp_path / "a", reference, quantization, dtype), reference, 33)
    decoder = decoder_of(name, tmp_path / "b", native, quantization, dtype)
    logits = logits_in_chunks(decoder, native, 33)
    # A digit's difference in attention can move an activation to the next of its 255 steps.
    assert (logits - expected).norm() / expected.norm() < (0.01 if dtype is torch.float32 else 0.03)
    for chunk in (1, 7, 512):
        assert torch.equal(logits_in_chunks(decoder, native, chunk, block_size=16), logits)


def test_counts_every_parameter_once(tmp_path: Path) -> None:
    backend = ReferenceBackend()
    plain = decoder_of("llama-biases", tmp_path / "a", backend, "none")
    for quantization in QUANTIZATIONS:
        decoder = decoder_of("llama-biases", tmp_path / quantization, backend, quantization)
        assert decoder.num_parameters == plain.num_parameters


class SpyBackend(ReferenceBackend):
    """Notes what kinds of layers were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Int4Weight] = []
        self.num_int8 = 0

    def int4_linear(self, weight: Int4Weight, bias: Tensor | None = None, **options: Any) -> ReferenceInt4Linear:
        self.weights.append(weight)
        return super().int4_linear(weight, bias, **options)

    def int8_linear(self, weight: Tensor, bias: Tensor | None = None, **options: Any) -> ReferenceInt8Linear:
        self.num_int8 += 1
        return super().int8_linear(weight, bias, **options)


def q4_1(values: Tensor) -> tuple[tuple[int, ...], int, bytes]:
    """A tensor of a GGUF file in blocks of Q4_1 with integers of any kind, scales of 1 and minimums of 2."""
    integers = (values.flatten() * 100).to(torch.int64).remainder(16).to(torch.uint8).view(-1, 2, 16)
    head = torch.tensor([1.0, 2.0]).half().view(torch.uint8).expand(len(integers), 4)
    return tuple(values.shape), 3, torch.cat([head, integers[:, 0] | integers[:, 1] << 4], dim=1).numpy().tobytes()


@pytest.mark.parametrize("is_tied", [False, True])
def test_int4_keeps_groups_and_a_head_of_8_bits(is_tied: bool, tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=is_tied, intermediate_size=64)
    tensors = gguf_tensors(config, tiny_weights(config))
    metadata = gguf_metadata(config) | plain_vocabulary(config["vocab_size"])
    names = [name for name in tensors if name.startswith("blk.0.ffn") and "norm" not in name]
    raw = {name: q4_1(torch.from_numpy(tensors.pop(name))) for name in names}
    backend = SpyBackend()
    for head in (False, True):
        if head:  # the head's name, or the tied table's
            name = "token_embd.weight" if is_tied else "output.weight"
            raw[name] = q4_1(torch.from_numpy(tensors.pop(name)))
        path = write_gguf(tmp_path / f"{head}.gguf", metadata, tensors, raw=raw)
        checkpoint = open_checkpoint(find_model(str(path)))
        backend.weights, backend.num_int8 = [], 0
        decoder = Decoder(
            checkpoint.config, checkpoint.weights, backend, torch.float32, num_sampled=90, quantization="int4"
        )
        assert decoder.num_parameters == checkpoint.weights.num_elements()
        kept = [bool((weight.scales == 1).all() and (weight.minimums == 2).all()) for weight in backend.weights]
        per_layer = [False, False, True, True] + [False] * 4 * (config["num_hidden_layers"] - 1)
        assert kept == per_layer + [True] * head
        assert backend.num_int8 == (0 if head else 1)
        assert not head or backend.weights[-1].integers.shape[0] == 90


def test_default_model_in_int4(default_model: Path) -> None:
    """The file's own groups: near fp32, with the same bits whatever the chunk."""
    try:
        native = load_backend("cpu", num_threads=2)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    checkpoint = open_checkpoint(find_model(str(default_model)))
    expected = logits_in_chunks(load_decoder(checkpoint, native), native, 80)
    decoder = load_decoder(checkpoint, native, torch.bfloat16, "int4")
    logits = logits_in_chunks(decoder, native, 80)
    assert (logits - expected).norm() / expected.norm() < 0.1
    for chunk in (1, 33):
        assert torch.equal(logits_in_chunks(decoder, native, chunk), logits)
