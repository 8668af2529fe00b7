from __future__ import annotations

import pytest
import torch

from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo_kernels.reference import ReferenceBackend
from octavo_worker.device import resolve_batched_tokens, resolve_dtype, resolve_kv_dtype, resolve_quantization
from octavo_worker.devices import CpuDevice
from tests.worker.late_device import LateDevice


@pytest.mark.parametrize(("configured", "on_cpu", "elsewhere"), [(0, 512, 2048), (64, 64, 64)])
def test_batched_tokens(configured: int, on_cpu: int, elsewhere: int) -> None:
    config = WorkerConfig(max_num_batched_tokens=configured)
    assert resolve_batched_tokens(config, CpuDevice()) == on_cpu
    assert resolve_batched_tokens(config, LateDevice()) == elsewhere


def test_dtypes() -> None:
    """A dtype that kernels do not know was a bare assertion (BR-109)."""
    assert resolve_dtype(WorkerConfig(), "bfloat16") == ("bfloat16", torch.bfloat16)
    assert resolve_dtype(WorkerConfig(dtype="float16"), "bfloat16") == ("float16", torch.float16)
    with pytest.raises(ConfigError, match="the checkpoint's dtype is 'float64'; give --dtype"):
        resolve_dtype(WorkerConfig(), "float64")


class FastBackend(ReferenceBackend):
    """Fast at int8, and without 8-bit floats."""

    has_fast_int8 = True
    has_float8 = False


def test_kv_dtype() -> None:
    backend, without = ReferenceBackend(), FastBackend()
    assert resolve_kv_dtype(WorkerConfig(), "bfloat16", without) == ("bfloat16", torch.bfloat16)
    assert resolve_kv_dtype(WorkerConfig(kv_cache_dtype="int8"), "float16", without) == ("int8", torch.int8)
    config = WorkerConfig(kv_cache_dtype="fp8_e4m3")
    assert resolve_kv_dtype(config, "float16", backend) == ("fp8_e4m3", torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is fp8_e4m3, .* use --kv-cache-dtype int8"):
        resolve_kv_dtype(config, "float16", without)
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8'; it must be one of auto, int8, fp8_e4m3"):
        WorkerConfig(kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("setting", "dtype", "backend", "is_quantized", "expected"),
    [
        ("auto", "bfloat16", FastBackend(), True, "int8"),
        ("auto", "bfloat16", FastBackend(), False, "none"),
        ("auto", "float32", FastBackend(), True, "none"),
        ("auto", "float16", FastBackend(), True, "none"),
        ("auto", "bfloat16", ReferenceBackend(), True, "none"),
        ("none", "bfloat16", FastBackend(), True, "none"),
        ("int8", "float32", ReferenceBackend(), False, "int8"),
        ("int4", "float32", ReferenceBackend(), False, "int4"),
        ("int4", "bfloat16", FastBackend(), True, "int4"),
        ("fp8", "bfloat16", ReferenceBackend(), True, "fp8"),
    ],
)
def test_quantization(setting: str, dtype: str, backend: ReferenceBackend, is_quantized: bool, expected: str) -> None:
    config = WorkerConfig(quantization=setting)
    assert resolve_quantization(config, dtype, backend, is_quantized=is_quantized) == expected


def test_layers_that_the_kernels_do_not_have() -> None:
    with pytest.raises(ConfigError, match=r"quantization is fp8, .* use --quantization int8"):
        resolve_quantization(WorkerConfig(quantization="fp8"), "bfloat16", FastBackend(), is_quantized=False)
