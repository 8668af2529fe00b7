"""Reads the weights of a folder in the safetensors format, in one file or in shards with an index.

With an index, a tensor comes only from the file that the index maps it to: other weight files in the folder and
tensors that it does not map are not read.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import ModelLoadError
from octavo_kernels.int4 import Int4Weight
from octavo_worker.loaders.config import read_json
from octavo_worker.loaders.weights import check_shape

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a safetensors file: dtype in the format's words, shape, and its bytes' place in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsWeights:
    """The tensors of a folder.

    Raises ModelLoadError at once for a missing or broken file, so that a bad checkpoint fails before it is half loaded.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        self.files: dict[str, Path] = {}
        mapped = _weight_map(folder)
        for path in sorted(set(mapped.values())):
            header = read_header(path)
            for name, entry in header.items():
                if mapped.get(name) == path:
                    self.entries[name], self.files[name] = entry, path
        for name, path in mapped.items():
            if name not in self.entries:
                raise ModelLoadError(f"{path}: tensor {name} is missing, though {INDEX_NAME} maps it to this file")
        self._refuse_quantized()
        self._open: dict[Path, Any] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        entry = self.entries.get(name)
        if entry is None:
            raise ModelLoadError(f"{self.folder}: tensor {name} is missing from the weights")
        path = self.files[name]
        check_shape(str(path), name, entry.shape, shape)
        if entry.dtype not in _DTYPES:
            raise ModelLoadError(
                f"{path}: tensor {name} has dtype {entry.dtype}, which is not supported; "
                f"supported are {', '.join(_DTYPES)}"
            )
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path}: tensor {name} cannot be read: {error}") from None
        return tensor.to(dtype, copy=True)

    def get_int4(self, name: str, shape: tuple[int, int]) -> Int4Weight | None:
        return None  # quantized formats are not read

    def _refuse_quantized(self) -> None:
        """Older tools of GPTQ and AWQ say nothing in config.json; the names of their tensors do."""
        for name, path in self.files.items():
            if name.endswith(".qweight"):
                raise ModelLoadError(
                    f"{path}: tensor {name} is quantized as by GPTQ or AWQ, which is not supported; "
                    f"load the model it was made from, or a GGUF file of it"
                )

    def default_dtype(self) -> str:
        kinds = {_DTYPES.get(entry.dtype, "float32") for entry in self.entries.values()}
        return kinds.pop() if len(kinds) == 1 else "float32"

    def num_elements(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    def is_quantized(self) -> bool:
        return False  # quantized formats are not read


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors in a safetensors file. Raises ModelLoadError when it is missing, cut off or not in the format."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
            if not 0 < length <= size - 8:
                raise ModelLoadError(
                    f"{path}: is not a whole safetensors file: the header needs {8 + length} bytes, the file has {size}"
                )
            if length > _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{path}: is not a safetensors file: its header would have {length} bytes")
            content = json.loads(file.read(length))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: has a broken safetensors header: {error}") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: has a broken safetensors header: it is a JSON {type(content).__name__}")
    entries: dict[str, TensorEntry] = {}
    for name, value in content.items():
        if name == "__metadata__":
            continue
        try:
            start, end = value["data_offsets"]
            entry = TensorEntry(str(value["dtype"]), tuple(value["shape"]), 8 + length + start, 8 + length + end)
        except (TypeError, KeyError, ValueError):
            raise ModelLoadError(f"{path}: the header's entry of tensor {name} is broken") from None
        if entry.end > size:
            raise ModelLoadError(
                f"{path}: is cut off: tensor {name} needs bytes {entry.start} to {entry.end}, but the file has {size}"
            )
        entries[name] = entry
    return entries


def _weight_map(folder: Path) -> dict[str, Path]:
    """Which file each tensor comes from. Raises ModelLoadError when a file is missing or none is there."""
    index = folder / INDEX_NAME
    if index.exists():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise ModelLoadError(f"{index}: has no weight_map")
        missing = sorted({str(name) for name in mapping.values() if not (folder / str(name)).is_file()})
        if missing:
            raise ModelLoadError(f"{folder}: {', '.join(missing)} is missing, though {INDEX_NAME} names it")
        return {str(name): folder / str(file) for name, file in mapping.items()}
    single = folder / SINGLE_NAME
    if not single.is_file():
        shards = sorted(folder.glob("*.safetensors"))
        if len(shards) != 1:
            found = ", ".join(path.name for path in shards) or "none"
            raise ModelLoadError(
                f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME} (safetensors files found: {found}); "
                f"other weight formats are not read"
            )
        single = shards[0]
    return {name: single for name in read_header(single)}
