from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import ModelLoadError
from octavo_worker.loaders.safetensors import SafetensorsWeights
from tests.worker.checkpoints import tiny_config, tiny_weights, write_checkpoint, write_safetensors

NORM = "model.norm.weight"


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    weights = tiny_weights(tiny_config())
    sharded = SafetensorsWeights(write_checkpoint(tmp_path, tiny_config(), num_shards=3))
    for name, values in weights.items():
        assert np.array_equal(sharded.get(name, values.shape, torch.float32).numpy(), values)
    assert sharded.default_dtype() == "float32"


def test_only_tensors_of_the_index_are_used(tmp_path: Path) -> None:
    """Stray tensors and files took the place of the indexed ones (BR-111)."""
    folder = write_checkpoint(tmp_path, tiny_config(), num_shards=2)
    weights = tiny_weights(tiny_config())
    stray = {name: np.zeros_like(values) for name, values in weights.items()}
    write_safetensors(folder / "consolidated.safetensors", stray)
    write_safetensors(folder / "model.safetensors", stray)
    first = folder / "model-00001-of-00002.safetensors"
    names = list(weights)
    write_safetensors(first, {name: weights[name] for name in names[::2]} | {names[1]: stray[names[1]]})
    loaded = SafetensorsWeights(folder)
    assert np.array_equal(loaded.get(names[1], weights[names[1]].shape, torch.float32).numpy(), weights[names[1]])


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config(), num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors is missing"):
        SafetensorsWeights(folder)


def test_quantized_tensors_are_refused_before_any_is_read(tmp_path: Path) -> None:
    """Checkpoints of older tools failed in the middle, or loaded wrongly (BR-105, BR-106, BR-108)."""
    name = "model.layers.1.mlp.down_proj.qweight"
    folder = write_checkpoint(
        tmp_path, tiny_config(), weights={**tiny_weights(tiny_config()), name: np.zeros((6, 32), np.float32)}
    )
    with pytest.raises(
        ModelLoadError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.qweight is quantized as by GPTQ"
    ):
        SafetensorsWeights(folder)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_config(), num_shards=2)
    path = folder / "model-00001-of-00002.safetensors"
    write_safetensors(path, {"other": np.zeros(1, np.float32)})
    with pytest.raises(ModelLoadError, match=r"tensor model\.embed_tokens\.weight is missing, though"):
        SafetensorsWeights(folder)
    with pytest.raises(ModelLoadError, match=r"tensor model\.no\.such is missing"):
        SafetensorsWeights(write_checkpoint(tmp_path / "other", tiny_config())).get(
            "model.no.such", (1,), torch.float32
        )


def test_unexpected_shape_is_told_with_both(tmp_path: Path) -> None:
    weights = SafetensorsWeights(write_checkpoint(tmp_path, tiny_config()))
    with pytest.raises(
        ModelLoadError, match=r"tensor model\.norm\.weight has shape \[32\]; the config asks for \[64\]"
    ):
        weights.get(NORM, (64,), torch.float32)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 5000])
def test_cut_off_file(tmp_path: Path, size: int) -> None:
    path = write_checkpoint(tmp_path, tiny_config()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        (b"[]", 2, "has a broken safetensors header: it is a JSON list"),
        (b"[" * 100_000, 100_000, "has a broken safetensors header"),
        (b'{"a": 5}', 8, "the header's entry of tensor a is broken"),
        (b"{}", 200_000_000, "its header would have 200000000 bytes"),
    ],
)
def test_header_that_is_none(tmp_path: Path, header: bytes, length: int, message: str) -> None:
    path = write_checkpoint(tmp_path, tiny_config()) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + header)
    with path.open("r+b") as file:
        file.truncate(8 + length)  # sparse, where the header is long
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsWeights(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsWeights(tmp_path)
