from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo_worker.loaders.gguf import GGUFFile
from tests.worker.checkpoints import write_gguf

SCALARS = {"general.name": "Größe", "a.bool": True, "a.int": 7, "a.float": 0.5}
METADATA = {**SCALARS, "a.texts": ["x", "日"], "a.ints": [1, -2]}
TENSORS = {"one": np.arange(6, dtype=np.float32).reshape(2, 3), "two": np.ones(5, np.float32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", METADATA, TENSORS)


def test_reads_what_was_written(path: Path) -> None:
    file = GGUFFile(path)
    assert {key: file.metadata[key] for key in SCALARS} == SCALARS
    assert file.metadata["a.texts"] == ["x", "日"]
    assert file.metadata["a.ints"].tolist() == [1, -2]
    assert file.tensors["one"].shape == (2, 3)
    assert file.data("one").view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert file.floats("two") == (1, 1, 1, 1, 1)


def test_every_truncation_is_a_model_load_error(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in range(len(content) - 31):  # the last 31 bytes may be padding
        broken.write_bytes(content[:size])
        with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
            GGUFFile(broken)


def test_every_corrupt_byte_is_read_or_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    for at in range(len(content)):
        broken.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        with contextlib.suppress(ModelLoadError):  # nothing else may be raised
            GGUFFile(broken)


def test_cut_off_tensor_is_named_with_both_sizes(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-32])
    with pytest.raises(
        ModelLoadError, match=rf"tensor two needs bytes \d+ to \d+, but the file has {len(content) - 32}"
    ):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(20), "starts with b'GGML'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "is cut off"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (b"", "cannot be mapped"),
    ],
)
def test_broken_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        GGUFFile(path)


def test_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    """It was a bare assertion (BR-112)."""
    path = write_gguf(tmp_path / "model.gguf", {}, raw={"odd": ((32,), 16, bytes(66))})
    with pytest.raises(ModelLoadError, match="tensor odd has ggml type 16"):
        GGUFFile(path)


def test_rows_that_blocks_do_not_divide(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, raw={"odd": ((2, 40), 8, bytes(34 * 3))})
    with pytest.raises(ModelLoadError, match="rows of 40 values, which Q8_0 blocks of 32 do not divide"):
        GGUFFile(path)
