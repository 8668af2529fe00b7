"""Linear layers in the dtype of the activations: a matrix product that torch gives to the GPU's own library."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.backend import results_dtype
from octavo_kernels.triton.checks import check_activations
from octavo_kernels.triton.linear_tiles import check_call, check_weight


class TorchLinear:
    """`x @ weight.T + bias`, and the residual as the sum's starting value; keeps the tensors it was given."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
        check_activations("weight", weight)
        check_weight(weight, bias)
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)
        self._out_dtype = results_dtype(out_dtype, weight.dtype)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Linear`. The result is in the residual's memory where there is one."""
        check_call(x, residual, self.in_features, self.out_features, self._weight.dtype, self._out_dtype)
        if residual is None:
            # The library rounds to its own dtype first.
            return torch.nn.functional.linear(x, self._weight, self._bias).to(self._out_dtype)
        if self._bias is not None:
            residual = residual.add_(self._bias)
        return residual.addmm_(x, self._weight.T)
