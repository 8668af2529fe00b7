"""The GPU's own quantized linear layers, beside the same arithmetic in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.bench import Bench

_GROUP = 128


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer, what it should compute, and the bytes of its weights."""

    name: str
    layer: Callable[[Tensor], Tensor]
    oracle: Callable[[Tensor], Tensor]
    weight_bytes: int


def quantized_layers(bench: Bench, out_features: int, in_features: int) -> list[QuantizedLayer]:
    """Random layers of e4m3 and of 4 bits; none where the kernels are not Triton's."""
    if bench.backend.name != "triton":
        return []
    return [_fp8(bench, out_features, in_features), _int4(bench, out_features, in_features)]


def _fp8(bench: Bench, out_features: int, in_features: int) -> QuantizedLayer:
    from octavo_kernels.triton.linear_fp8 import Fp8Linear, quantize_fp8

    dtype = bench.sizes.dtype
    weight, scales = quantize_fp8(bench.normal(out_features, in_features, scale=0.02).float())

    def oracle(x: Tensor) -> Tensor:
        magnitude = x.float().abs().amax(dim=1, keepdim=True)
        largest = torch.full_like(magnitude, 448.0)
        stored = (x.float() * (largest / magnitude)).to(torch.float8_e4m3fn).float()
        return (stored @ weight.float().T * (magnitude / largest) * scales).to(x.dtype)

    layer = Fp8Linear(weight, scales, None, dtype)
    return QuantizedLayer("linear of e4m3", layer, oracle, weight.nbytes + scales.nbytes)


def _int4(bench: Bench, out_features: int, in_features: int) -> QuantizedLayer:
    from octavo_kernels.triton.linear_w4a16 import W4A16Linear

    dtype, device = bench.sizes.dtype, bench.device.torch_device
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(0, 16, (out_features, in_features), generator=generator, dtype=torch.uint8).to(device)
    groups = -(-in_features // _GROUP)
    scales = (torch.rand(out_features, groups, generator=generator) * 0.02 + 0.001).half().to(device)
    minimums = (scales * -7.3).half()

    def oracle(x: Tensor) -> Tensor:
        steps, offsets = (
            numbers.float().repeat_interleave(_GROUP, dim=1)[:, :in_features] for numbers in (scales, minimums)
        )
        weight = (integers.float() * steps + offsets).to(x.dtype).float()
        return (x.float() @ weight.T).to(x.dtype)

    layer = W4A16Linear(integers, scales, minimums, None, dtype, group=_GROUP)
    num_bytes = integers.numel() // 2 + scales.nbytes + minimums.nbytes
    return QuantizedLayer("linear of 4 bits", layer, oracle, num_bytes)
