"""The GPU's own quantized linear layers, beside the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpu.bench import Bench
from octavo_kernels.int4 import quantize_int4

# Units that multiply e4m3 sum 128 products in 13 or so digits.
_E4M3_LIMIT = 1e-3


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer, what it should compute, the bytes of its weights, and the difference allowed beside the dtype's."""

    name: str
    layer: Callable[[Tensor], Tensor]
    oracle: Callable[[Tensor], Tensor]
    weight_bytes: int
    limit: float = 0.0


def quantized_layers(bench: Bench, out_features: int, in_features: int) -> list[QuantizedLayer]:
    """Random layers of e4m3 and of 4 bits; none where the kernels are not Triton's."""
    if bench.backend.name != "triton":
        return []
    return [_fp8(bench, out_features, in_features), _int4(bench, out_features, in_features)]


def _fp8(bench: Bench, out_features: int, in_features: int) -> QuantizedLayer:
    weight, dtype = bench.normal(out_features, in_features, scale=0.02), bench.sizes.dtype
    layer, oracle = (backend.fp8_linear(weight, dtype=dtype) for backend in (bench.backend, bench.reference))
    return QuantizedLayer("linear of e4m3", layer, oracle, weight.numel() + 4 * out_features, _E4M3_LIMIT)


def _int4(bench: Bench, out_features: int, in_features: int) -> QuantizedLayer:
    weight, dtype = quantize_int4(bench.normal(out_features, in_features, scale=0.02).float()), bench.sizes.dtype
    layer, oracle = (
        bench.backend.int4_linear(weight, dtype=dtype),
        bench.reference.linear(weight.dequantize().to(dtype)),
    )
    num_bytes = weight.integers.numel() // 2 + weight.scales.nbytes + weight.minimums.nbytes
    return QuantizedLayer("linear of 4 bits", layer, oracle, num_bytes)
