"""Linear layers of the native CPU backend: weights packed once, called for any number of rows."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo_kernels.backend import results_dtype
from octavo_kernels.cpu.checks import DTYPES, dtype_code, refuse
from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.int4 import Int4Weight

if TYPE_CHECKING:
    from octavo_kernels.cpu.backend import CpuBackend


class CpuLinear:
    """A linear layer whose weights were packed into panels; holds no reference to the original tensors.

    group: None keeps the weight's dtype; a number quantizes to 8 bits, for activations of `dtype` in groups of as many.
    Weights of 4 bits come in groups of their own. out_dtype: of results, dtype or float32.
    """

    def __init__(
        self,
        backend: CpuBackend,
        weight: Tensor | Int4Weight,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        group: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise InvalidArgumentError(f"dtype is {dtype}; float32, bfloat16 and float16 are supported")
        self.out_features, self.in_features = _weight_shape(weight)
        bias_pointer = None
        if bias is not None:
            if bias.shape != (self.out_features,):
                refuse("bias", bias, f"a ({self.out_features},) is needed")
            bias = bias.to(torch.float32).contiguous()
            bias_pointer = bias.data_ptr()
        self.dtype, self.out_dtype = dtype, results_dtype(out_dtype, dtype)
        self._backend = backend  # keeps the context alive
        self._context = backend.context
        library = backend.library
        self._call = library.octavo_linear
        handle = ctypes.c_void_p()
        dtypes = (DTYPES[dtype], DTYPES[self.out_dtype])
        shape = (self.out_features, self.in_features, bias_pointer)
        into = ctypes.byref(handle)
        if isinstance(weight, Int4Weight):
            parts = [part.contiguous() for part in (weight.integers, weight.scales, weight.minimums)]
            pointers = [part.data_ptr() for part in parts]
            status = library.octavo_linear_create_int4(self._context, *dtypes, *pointers, *shape, into)
        elif group is None:
            status = library.octavo_linear_create(
                self._context, *dtypes, weight.data_ptr(), weight.stride(0), *shape, into
            )
        else:
            status = library.octavo_linear_create_int8(
                self._context, *dtypes, weight.data_ptr(), weight.stride(0), *shape, group, into
            )
        backend.check(status)
        self.handle = handle
        weakref.finalize(self, library.octavo_linear_destroy, handle).atexit = False

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self._check_rows(x)
        rows = x.shape[0]
        out = torch.empty((rows, self.out_features), dtype=self.out_dtype)
        if rows == 0:
            return out
        residual_pointer, residual_stride = None, 0
        if residual is not None:
            if self.out_dtype is not self.dtype:
                raise InvalidArgumentError(f"a layer that gives {self.out_dtype} takes no residual of {self.dtype}")
            if residual.dtype is not self.dtype or residual.shape != out.shape or residual.stride(1) != 1:
                refuse("residual", residual, f"{tuple(out.shape)} of {self.dtype} is needed")
            residual_pointer, residual_stride = residual.data_ptr(), residual.stride(0)
        self._backend.check(
            self._call(
                self._context,
                self.handle,
                x.data_ptr(),
                x.stride(0),
                rows,
                residual_pointer,
                residual_stride,
                out.data_ptr(),
            )
        )
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """`Backend.linear_argmax`."""
        self._check_rows(x)
        if self.out_dtype is not torch.float32:
            raise InvalidArgumentError(f"the layer gives {self.out_dtype}; what is compared must be float32")
        out = torch.empty(x.shape[0], dtype=torch.int64)
        if x.shape[0]:
            call = self._backend.library.octavo_linear_argmax
            self._backend.check(call(self._context, self.handle, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr()))
        return out

    def _check_rows(self, x: Tensor) -> None:
        if x.dtype is not self.dtype or x.dim() != 2 or x.shape[1] != self.in_features or x.stride(1) != 1:
            refuse("x", x, f"(rows, {self.in_features}) of {self.dtype}, the last dimension contiguous, is needed")


def _weight_shape(weight: Tensor | Int4Weight) -> tuple[int, int]:
    if isinstance(weight, Int4Weight):
        device = weight.integers.device
        if device.type != "cpu":
            raise InvalidArgumentError(f"integers lie on {device}; the cpu backend takes CPU tensors")
        return weight.integers.shape[0], weight.integers.shape[1]
    dtype_code(weight, "weight")
    if weight.dim() != 2 or weight.stride(1) != 1:
        refuse("weight", weight, "two dimensions, the last contiguous, are needed")
    if weight.numel() == 0:
        refuse("weight", weight, "no dimension may be empty")
    return weight.shape[0], weight.shape[1]
