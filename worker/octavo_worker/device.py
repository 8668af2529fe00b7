"""Resolves the settings that depend on the device and its kernels: dtypes, quantization, tokens of a step.

Which device it is `octavo_worker.devices` finds.
"""

from __future__ import annotations

import torch

from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo_kernels import Backend
from octavo_worker.devices import Device
from octavo_worker.loaders.config import DTYPE_BYTES
from octavo_worker.models.layers import QUANTIZATIONS, Quantization

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = _DTYPES | {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


def resolve_dtype(config: WorkerConfig, checkpoint_dtype: str) -> tuple[str, torch.dtype]:
    """Name and dtype of `--dtype`; "auto" takes the checkpoint's own. Raises ConfigError for an unknown one."""
    name = checkpoint_dtype if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ConfigError(f"the checkpoint's dtype is {name!r}; give --dtype, one of {', '.join(DTYPE_BYTES)}")
    return name, _DTYPES[name]


def resolve_batched_tokens(config: WorkerConfig, device: Device) -> int:
    """`--max-num-batched-tokens`; 0 takes as many as suit the device.

    Where launches of a step take the host as long whatever its tokens, more of them are to share these. A step of a CPU
    lasts as long as its tokens ask for, and those that decode beside a prompt wait for it.
    """
    return config.max_num_batched_tokens or (2048 if device.is_asynchronous else 512)


def resolve_kv_dtype(config: WorkerConfig, dtype_name: str, backend: Backend) -> tuple[str, torch.dtype]:
    """Name and dtype of `--kv-cache-dtype`; "auto" takes that of activations. Raises ConfigError for one in which the
    backend keeps no K and V.
    """
    name = dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    dtype = _KV_DTYPES[name]
    if dtype is torch.float8_e4m3fn and not backend.has_float8:
        raise ConfigError(
            f"kv_cache_dtype is {name}, in which the {backend.name} kernels keep no K and V; "
            "use --kv-cache-dtype int8, which takes as much memory"
        )
    return name, dtype


def resolve_quantization(
    config: WorkerConfig, dtype_name: str, backend: Backend, *, is_quantized: bool
) -> Quantization:
    """`--quantization`. "auto" lets a quantized file compute in its own class of precision, where that is faster: on
    kernels that are made for it. float32 and float16 compute what they say. Raises ConfigError for layers that the
    backend does not have.
    """
    if config.quantization == "fp8" and not backend.has_float8:
        raise ConfigError(
            f"quantization is fp8, and the {backend.name} kernels have no such layers; "
            "use --quantization int8, which takes about as much memory"
        )
    for named in QUANTIZATIONS:
        if config.quantization == named:
            return named
    return "int8" if is_quantized and backend.has_fast_int8 and dtype_name == "bfloat16" else "none"
