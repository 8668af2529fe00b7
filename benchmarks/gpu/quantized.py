"""The GPU's own quantized linear layers, beside the oracle's, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpu.bench import Bench
from octavo_kernels.int4 import quantize_int4


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer, what it should compute, and the bytes of its weights."""

    layer: Callable[[Tensor], Tensor]
    oracle: Callable[[Tensor], Tensor]
    weight_bytes: int


MakeLayer = Callable[[Bench, int, int], QuantizedLayer]


def quantized_layers(bench: Bench) -> dict[str, MakeLayer]:
    """What makes a random layer of so many outputs and inputs, by its name: of e4m3 and of 4 bits; none where the
    kernels are not Triton's."""
    return {"linear of e4m3": _fp8, "linear of 4 bits": _int4} if bench.backend.name == "triton" else {}


def _fp8(bench: Bench, out_features: int, in_features: int) -> QuantizedLayer:
    weight, dtype = bench.normal(out_features, in_features, scale=0.02), bench.sizes.dtype
    layer, oracle = (backend.fp8_linear(weight, dtype=dtype) for backend in (bench.backend, bench.reference))
    return QuantizedLayer(layer, oracle, weight.numel() + 4 * out_features)


def _int4(bench: Bench, out_features: int, in_features: int) -> QuantizedLayer:
    weight, dtype = quantize_int4(bench.normal(out_features, in_features, scale=0.02).float()), bench.sizes.dtype
    layer, oracle = (
        bench.backend.int4_linear(weight, dtype=dtype),
        bench.reference.linear(weight.dequantize().to(dtype)),
    )
    num_bytes = weight.integers.numel() // 2 + weight.scales.nbytes + weight.minimums.nbytes
    return QuantizedLayer(layer, oracle, num_bytes)
