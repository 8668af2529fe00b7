"""Reads GGUF files: header, metadata and where each tensor's bytes lie.

The file is mapped, not read. Every length and offset in it is checked against the file's real size, so that a broken
file gives a ModelLoadError and nothing else. What metadata means is for `gguf_config` and `gguf_tokenizer`; what the
bytes of a tensor mean for `gguf_quants`. No torch in here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class QuantType:
    """A type of tensor data: `block_elements` values are stored in `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int


QUANT_TYPES: dict[int, QuantType] = {
    0: QuantType("F32", 1, 4),
    1: QuantType("F16", 1, 2),
    2: QuantType("Q4_0", 32, 18),
    3: QuantType("Q4_1", 32, 20),
    6: QuantType("Q5_0", 32, 22),
    7: QuantType("Q5_1", 32, 24),
    8: QuantType("Q8_0", 32, 34),
    10: QuantType("Q2_K", 256, 84),
    11: QuantType("Q3_K", 256, 110),
    12: QuantType("Q4_K", 256, 144),
    13: QuantType("Q5_K", 256, 176),
    14: QuantType("Q6_K", 256, 210),
    30: QuantType("BF16", 1, 2),
}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in the file. shape: as in torch, the fastest dimension last; offset: of its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    quant_type: QuantType
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file.

    metadata: key to value; arrays of numbers are numpy arrays, arrays of strings lists. tensors: name to `GGUFTensor`.
    Raises ModelLoadError when the file is not GGUF, is cut off, or holds tensors of a type that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be mapped: {error}") from None
        self.num_bytes = len(self._map)
        cursor = _Cursor(self._map, path)
        tensor_count, metadata_count = _read_header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = cursor.string("a metadata key")
            self.metadata[key] = cursor.value(cursor.u32(f"the type of {key}"), key)
        self.tensors = _read_tensors(cursor, tensor_count, self._alignment())

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, as stored, without a copy. Read-only."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def floats(self, name: str) -> tuple[float, ...]:
        """The values of a small F32 tensor. Raises ModelLoadError for another type."""
        tensor = self.tensors[name]
        if tensor.quant_type.name != "F32":
            raise ModelLoadError(f"{self.path}: tensor {name} has type {tensor.quant_type.name}; it must be F32")
        return tuple(self.data(name).view("<f4").tolist())

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """A token id in the metadata, None where it has none. Raises ModelLoadError for what is no token's id."""
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
            raise ModelLoadError(f"{self.path}: metadata {key} is {value!r}; the vocabulary has {num_tokens} tokens")
        return value

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            raise ModelLoadError(f"{self.path}: general.alignment is {value!r}; it must be a power of two")
        return value


class _Cursor:
    """Reads values from the front of the file on; checks each against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.end, self.at = data, path, len(data), 0

    def take(self, count: int, what: str) -> int:
        """The offset of the next `count` bytes, which are skipped."""
        start = self.at
        if count > self.end - start:
            raise ModelLoadError(
                f"{self.path}: is cut off: {what} needs {count} bytes at byte {start}, but the file ends at {self.end}"
            )
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self.path}: {what} at byte {start} is not valid UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path}: metadata {key} has unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(dtype.itemsize, key)
        return np.frombuffer(self.data, dtype=dtype, count=1, offset=start)[0].item()

    def _array(self, key: str) -> Any:
        kind, count = self.u32(key), self.u64(key)
        if kind == _STRING:
            return self._strings(count, key)
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path}: metadata {key} is an array of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize, key)
        return np.frombuffer(self.data, dtype=dtype, count=count, offset=start)

    def _strings(self, count: int, key: str) -> list[str]:
        """An array of strings. A vocabulary has 10^5 of them, so the loop works on local names."""
        if count * 8 > self.end - self.at:
            self.take(count * 8, key)
        data, at, end = self.data, self.at, self.end
        unpack: Callable[[Any, int], tuple[int]] = _U64.unpack_from
        items: list[str] = []
        append = items.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > end:
                    break
                append(str(data[start:at], "utf-8"))
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ModelLoadError(f"{self.path}: item {len(items)} of metadata {key} cannot be read: {error}") from None
        if len(items) != count:
            raise ModelLoadError(
                f"{self.path}: is cut off: item {len(items)} of metadata {key} ends at byte {at}, "
                f"but the file ends at {end}"
            )
        self.at = at
        return items


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata entries."""
    start = cursor.take(4, "the header")
    magic = cursor.data[start : start + 4]
    if magic != MAGIC:
        raise ModelLoadError(f"{cursor.path}: is not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
    version = cursor.u32("the header")
    if version and not version & 0xFFFF:
        raise ModelLoadError(f"{cursor.path}: is a big-endian GGUF file; only little-endian ones are supported")
    if version not in (2, 3):
        raise ModelLoadError(f"{cursor.path}: GGUF version {version} is not supported; supported are 2 and 3")
    return cursor.u64("the header"), cursor.u64("the header")


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.string("a tensor's name")
        what = f"the entry of tensor {name}"
        num_dims = cursor.u32(what)
        if not 1 <= num_dims <= 4:
            raise ModelLoadError(f"{cursor.path}: tensor {name} has {num_dims} dimensions; it must have 1 to 4")
        shape = tuple(cursor.u64(what) for _ in range(num_dims))[::-1]
        found.append((name, shape, cursor.u32(what), cursor.u64(what)))
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in found:
        tensors[name] = _locate(cursor, name, shape, kind, data_start + offset)
    return tensors


def _locate(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    quant_type = QUANT_TYPES.get(kind)
    if quant_type is None:
        supported = ", ".join(item.name for item in QUANT_TYPES.values())
        raise ModelLoadError(
            f"{cursor.path}: tensor {name} has ggml type {kind}, which is not supported; supported are {supported}"
        )
    if shape[-1] % quant_type.block_elements:
        raise ModelLoadError(
            f"{cursor.path}: tensor {name} has rows of {shape[-1]} values, "
            f"which {quant_type.name} blocks of {quant_type.block_elements} do not divide"
        )
    elements = 1
    for size in shape:
        elements *= size
    num_bytes = elements // quant_type.block_elements * quant_type.block_bytes
    if offset + num_bytes > cursor.end:
        raise ModelLoadError(
            f"{cursor.path}: is cut off: tensor {name} needs bytes {offset} to {offset + num_bytes}, "
            f"but the file has {cursor.end}"
        )
    return GGUFTensor(name, shape, quant_type, offset, num_bytes)
