"""Checks of what the Triton ops are given: shapes, strides, dtypes and devices, never values.

Values of tensors on a device cannot be looked at without waiting for it, so ids are the caller's to get right. Where a
kernel can pass over one that points outside of what it indexes at no cost, it does, and its op says so.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from octavo_kernels.errors import InvalidArgumentError

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows that one program holds in registers as a whole.
LARGEST_ROW = 1 << 15


def refuse(name: str, tensor: Tensor, wanted: str) -> NoReturn:
    """Raises InvalidArgumentError that shows the tensor and says what is needed."""
    raise InvalidArgumentError(
        f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and dtype {tensor.dtype}; {wanted}"
    )


def check_activations(name: str, tensor: Tensor) -> None:
    """A float dtype that the kernels compute with, the last dimension contiguous."""
    if tensor.dtype not in ACTIVATION_DTYPES:
        raise InvalidArgumentError(f"{name} has dtype {tensor.dtype}; float32, bfloat16 and float16 are supported")
    if tensor.dim() == 0 or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
        refuse(name, tensor, "the last dimension must be contiguous")


def check_column(name: str, tensor: Tensor, length: int, dtype: torch.dtype) -> None:
    """A contiguous vector."""
    if tensor.dtype is not dtype or tensor.shape != (length,) or not tensor.is_contiguous():
        refuse(name, tensor, f"a contiguous ({length},) of {dtype} is needed")
