"""Checks of the tensors that the native CPU backend is given: few and cheap, since they stand before every op.

Ids, positions and slots the library checks itself.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from octavo_kernels.backend import AttentionBatch
from octavo_kernels.errors import InvalidArgumentError

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The library's codes of dtypes."""


def dtype_code(tensor: Tensor, name: str) -> int:
    """The code of a tensor's dtype. Raises InvalidArgumentError where the library cannot take the tensor."""
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise InvalidArgumentError(f"{name} has dtype {tensor.dtype}; float32, bfloat16 and float16 are supported")
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(f"{name} lies on {tensor.device}; the cpu backend takes CPU tensors")
    return code


def refuse(name: str, tensor: Tensor, wanted: str) -> NoReturn:
    """Raises InvalidArgumentError for a tensor that is not as `wanted` says."""
    raise InvalidArgumentError(
        f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and dtype {tensor.dtype}; {wanted}"
    )


def check_column(tensor: Tensor, name: str, length: int, dtype: torch.dtype) -> None:
    """Refuses what is not a contiguous (length,) of dtype."""
    if tensor.dtype is not dtype or tensor.shape != (length,) or not tensor.is_contiguous():
        refuse(name, tensor, f"a contiguous ({length},) of {dtype} is needed")


def check_batch(batch: AttentionBatch, tokens: int) -> None:
    """Refuses a batch whose columns, without the slots, do not fit together and to so many tokens."""
    tables = batch.block_tables
    sequences = tables.shape[0]
    check_column(batch.positions, "positions", tokens, torch.int32)
    check_column(batch.query_starts, "query_starts", sequences + 1, torch.int32)
    check_column(batch.context_lens, "context_lens", sequences, torch.int32)
    if tables.dtype is not torch.int32 or tables.dim() != 2 or (tables.shape[1] > 1 and tables.stride(1) != 1):
        refuse("block_tables", tables, "(sequences, max_blocks) of int32, rows contiguous, is needed")


def check_rotary_table(cos_sin: Tensor, head_dim: int) -> tuple[int, int]:
    """max_positions and rotary_dim of a table for heads of head_dim."""
    if cos_sin.dtype is not torch.float32 or cos_sin.dim() != 2 or not cos_sin.is_contiguous():
        refuse("cos_sin", cos_sin, "a contiguous (max_positions, rotary_dim) of float32 is needed")
    max_positions, rotary_dim = cos_sin.shape
    if rotary_dim > head_dim or rotary_dim % 2 != 0:
        raise InvalidArgumentError(f"rotary_dim is {rotary_dim}; it must be even and at most head_dim, {head_dim}")
    return max_positions, rotary_dim
