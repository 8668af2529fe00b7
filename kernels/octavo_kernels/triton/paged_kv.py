"""How the kernels see the paged K and V of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from octavo_kernels.backend import QUANTIZED_LIMITS, KVLayout, LayerKV
from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.triton.attention_tile import V_UNIT
from octavo_kernels.triton.checks import refuse
from octavo_kernels.triton.device import DeviceTraits

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_STORED_DTYPES = (*TL_DTYPES, *QUANTIZED_LIMITS)
# `decode_e4m3` gives numbers divided by this.
_E4M3_UNIT = 256.0


@dataclass(frozen=True)
class PagedTiles:
    """A layer's tiles with what a launch needs of their shape; strides count items.

    k, v: as of LayerKV, but of uint8 for e4m3 where the GPU has no instructions for it; unit: what a tile that
    `attention_tile.widen` gives is to be multiplied by
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    unit: float

    @property
    def head_dim(self) -> int:
        """Values of a position's K."""
        return self.k.shape[2]

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        return self.k.shape[3]

    @property
    def constants(self) -> dict[str, int | bool]:
        """Compile-time arguments of an attention kernel. See `tile_constants`."""
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": padded_head_dim(self.head_dim),
            "BLOCK_SIZE": self.block_size,
            "K_TRANSPOSED": self.k.stride(2) != 1,
            "V_TRANSPOSED": self.v.stride(2) == 1,
            "QUANTIZED": self.k_scales is not None,
        }

    @property
    def v_unit(self) -> float:
        """What a sum of quantized V is to be multiplied by; see `attention_tile.V_UNIT`."""
        return self.unit / float(V_UNIT.value)

    @property
    def scale_strides(self) -> tuple[int, int]:
        """Of blocks and heads in the scales; zeros without scales."""
        return (0, 0) if self.k_scales is None else (self.k_scales.stride(0), self.k_scales.stride(1))


def kv_layout(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> KVLayout:
    """K position by position; V so too, but transposed where it is quantized.

    A tensor core takes each operand's numbers in pairs along the dimension that is summed over: head_dim for K,
    positions for V. 16-bit numbers come out of shared memory paired either way; 8-bit ones only where the pairs lie
    together, and otherwise byte by byte.
    """
    return KVLayout(
        num_layers,
        num_kv_heads,
        head_dim,
        block_size,
        dtype,
        k_transposed=False,
        v_transposed=dtype in QUANTIZED_LIMITS,
    )


def tile_constants(head_dim: int, block_size: int, is_quantized: bool) -> dict[str, int | bool]:
    """Compile-time arguments of an attention kernel over a pool of `kv_layout`."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_SIZE": block_size,
        "K_TRANSPOSED": False,
        "V_TRANSPOSED": is_quantized,
        "QUANTIZED": is_quantized,
    }


def padded_head_dim(head_dim: int) -> int:
    """The dimensions of a tile: a power of two, and enough for a tensor core."""
    return max(16, 1 << (head_dim - 1).bit_length())


def compute_dtype(dtype: torch.dtype, stored: torch.dtype, *, interpreted: bool) -> torch.dtype:
    """The dtype in which attention of activations of `dtype` multiplies matrices with K and V of `stored`.

    E4M3 becomes fp16 in fewer instructions than bf16, which at its bandwidth decides. The interpreter's arithmetic in
    bf16 is that of the integers which hold the bits; there it is fp32.
    """
    if dtype is torch.bfloat16:
        return torch.float32 if interpreted else torch.float16 if stored is torch.float8_e4m3fn else dtype
    return dtype


def check_tiles(kv: LayerKV) -> None:
    """Raises InvalidArgumentError unless kv's tiles are contiguous, K and V alike, of a dtype that the kernels read."""
    k, v = kv.k, kv.v
    if k.dtype not in _STORED_DTYPES:
        raise InvalidArgumentError(f"kv.k has dtype {k.dtype}; {', '.join(map(str, _STORED_DTYPES))} are supported")
    if (kv.k_scales is None or kv.v_scales is None) == (k.dtype in QUANTIZED_LIMITS):
        raise InvalidArgumentError(f"kv.k has dtype {k.dtype}; 8-bit K and V have scales, and no others have")
    if k.dim() != 4 or v.shape != (k.shape[0], k.shape[1], k.shape[3], k.shape[2]) or v.dtype is not k.dtype:
        refuse("kv.v", v, f"it must match kv.k of shape {tuple(k.shape)} and dtype {k.dtype}")
    head_dim, block_size = k.shape[2:]
    if k.stride()[2:] not in ((block_size, 1), (1, head_dim)) or v.stride()[2:] not in ((head_dim, 1), (1, block_size)):
        refuse("kv.k", k, "contiguous tiles of K and V, either transposed or not, are needed")
    if k.stride()[:2] != v.stride()[:2]:
        refuse("kv.v", v, f"the strides of kv.k, {k.stride()}, are needed between blocks and heads")


def paged_tiles(kv: LayerKV, traits: DeviceTraits) -> PagedTiles:
    """The tiles of a layer, no copy."""
    if kv.k.dtype is torch.float8_e4m3fn and not traits.native_float8:
        return PagedTiles(kv.k.view(torch.uint8), kv.v.view(torch.uint8), kv.k_scales, kv.v_scales, _E4M3_UNIT)
    return PagedTiles(kv.k, kv.v, kv.k_scales, kv.v_scales, 1.0)
