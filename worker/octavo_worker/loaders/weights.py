"""Where a decoder gets its tensors from: one interface over safetensors and GGUF.

Names and shapes are those of Hugging Face's checkpoints. A tensor that is missing or has another shape is a
ModelLoadError that names file, tensor and both shapes.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import ModelLoadError
from octavo_kernels.int4 import Int4Weight
from octavo_worker.loaders.config import ModelConfig
from octavo_worker.loaders.gguf import GGUFFile, QuantType
from octavo_worker.loaders.gguf_config import gguf_tensor_name
from octavo_worker.loaders.gguf_quants import dequantize, int4_groups


class Weights(Protocol):
    """The tensors of a checkpoint."""

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU in `dtype`, the caller's own to keep.

        Raises ModelLoadError when it is missing, has another shape or cannot be read.
        """
        ...

    def get_int4(self, name: str, shape: tuple[int, int]) -> Int4Weight | None:
        """A matrix in the groups of 4 bits that it is stored in, on the CPU; None where it is stored in no such.

        Raises ModelLoadError as `get` does.
        """
        ...

    def default_dtype(self) -> str:
        """The dtype of the checkpoint, for configs that do not name it."""
        ...

    def num_elements(self) -> int:
        """The number of values in all tensors."""
        ...

    def is_quantized(self) -> bool:
        """Whether most values are stored in less than 16 bits."""
        ...


class GGUFWeights:
    """The tensors of a GGUF file, dequantized or in its groups of 4 bits."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._permuted = file.metadata.get("general.architecture") == "llama"
        self._num_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        data, quant_type = self._stored(name, shape)
        return self._in_order(name, dequantize(data, quant_type, dtype).view(shape))

    def get_int4(self, name: str, shape: tuple[int, int]) -> Int4Weight | None:
        groups = int4_groups(*self._stored(name, shape))
        if groups is None:
            return None
        integers, scales, minimums = (self._in_order(name, part.view(shape[0], -1)) for part in groups)
        return Int4Weight(integers, scales, minimums)

    def _stored(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, QuantType]:
        stored = gguf_tensor_name(name)
        tensor = self._file.tensors.get(stored)
        if tensor is None:
            raise ModelLoadError(f"{self._file.path}: tensor {stored} ({name}) is missing")
        check_shape(str(self._file.path), stored, tensor.shape, shape)
        return torch.frombuffer(bytearray(self._file.data(stored)), dtype=torch.uint8), tensor.quant_type

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        heads = self._num_heads.get(name.split(".")[-2]) if self._permuted else None
        return rows if heads is None else _unpermute(rows, heads)

    def default_dtype(self) -> str:
        return "bfloat16"

    def num_elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self._file.tensors.values())

    def is_quantized(self) -> bool:
        return sum(tensor.num_bytes for tensor in self._file.tensors.values()) < 1.5 * self.num_elements()


def _unpermute(values: Tensor, num_heads: int) -> Tensor:
    """Undoes what llama.cpp's converter does to the rows of q and k of llama models.

    It interleaves the two halves of each head, since its rotary positions pair neighbours; ours pair i and i + half.
    """
    halves = values.view(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def check_shape(where: str, name: str, real: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises ModelLoadError when a tensor has another shape than the config asks for."""
    if tuple(real) != tuple(expected):
        raise ModelLoadError(f"{where}: tensor {name} has shape {list(real)}; the config asks for {list(expected)}")
