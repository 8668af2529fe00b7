from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo_kernels import Backend, BackendUnavailableError, load_backend
from octavo_kernels.reference import ReferenceBackend, ReferenceLinear
from octavo_worker.loaders.checkpoint import open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from octavo_worker.models.layers import Quantization
from tests.worker.cases import MODEL_CASES
from tests.worker.checkpoints import write_checkpoint
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


@pytest.mark.parametrize("name", CASES)
def test_int8_is_close(name: str, tmp_path: Path) -> None:
    backend = ReferenceBackend()
    expected = logits_in_chunks(decoder_of(name, tmp_path / "a", backend, "none"), backend, 33)
    logits = logits_in_chunks(decoder_of(name, tmp_path / "b", backend, "int8"), backend, 33)
    assert 0 < (logits - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_kernels_give_the_same(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    try:
        native = load_backend("cpu", num_threads=2)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    reference = ReferenceBackend()
    expected = logits_in_chunks(decoder_of(name, tmp_path / "a", reference, "int8", dtype), reference, 33)
    decoder = decoder_of(name, tmp_path / "b", native, "int8", dtype)
    logits = logits_in_chunks(decoder, native, 33)
    # A digit's difference in attention can move an activation to the next of its 255 steps.
    assert (logits - expected).norm() / expected.norm() < (0.01 if dtype is torch.float32 else 0.03)
    for chunk in (1, 7, 512):
        assert torch.equal(logits_in_chunks(decoder, native, chunk, block_size=16), logits)


def test_counts_every_parameter_once(tmp_path: Path) -> None:
    backend = ReferenceBackend()
    plain = decoder_of("llama-biases", tmp_path / "a", backend, "none")
    assert decoder_of("llama-biases", tmp_path / "b", backend, "int8").num_parameters == plain.num_parameters
