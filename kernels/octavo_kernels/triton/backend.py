"""The GPU backend: Triton kernels, one op a file, and torch's matrix products.

No op waits for the device or looks at values there, so that all of them can be captured in a CUDA graph: shapes,
strides and dtypes are checked, ids are not (`checks`). Kernels run in Triton's interpreter on the CPU too, where the
environment says TRITON_INTERPRET=1; that is for tests.

Row invariance. Norms, rotary positions, activation, cache writes, filters, sampling and 8-bit integer linear layers
give a row the same bits whatever stands beside it. Matrix products of floating-point numbers do not: the library
chooses how it sums by the shape. So the backend as a whole is not row-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, DecoderLayer, DecoderShape, KVLayout, LayerKV, Linear
from octavo_kernels.decode_state import DecodeColumns, DecodeInputs, DecodeState
from octavo_kernels.int4 import Int4Weight
from octavo_kernels.layers import ComposedLayers
from octavo_kernels.triton.advance_decode import advance_decode
from octavo_kernels.triton.ban_tokens import ban_tokens
from octavo_kernels.triton.blocks import copy_blocks, move_blocks
from octavo_kernels.triton.gumbel_argmax import gumbel_argmax
from octavo_kernels.triton.least_kept import least_kept
from octavo_kernels.triton.linear import TorchLinear
from octavo_kernels.triton.linear_fp8 import Fp8Linear
from octavo_kernels.triton.linear_int8 import Int8Linear
from octavo_kernels.triton.linear_w4a16 import W4A16Linear
from octavo_kernels.triton.paged_attention import paged_attention
from octavo_kernels.triton.paged_kv import kv_layout
from octavo_kernels.triton.rms_norm import rms_norm
from octavo_kernels.triton.rotary import rotary
from octavo_kernels.triton.rotary_write_kv import rotary_write_kv
from octavo_kernels.triton.silu_mul import silu_mul
from octavo_kernels.triton.write_kv import write_kv


class TritonBackend:
    """See `octavo_kernels.backend.Backend` for the ops."""

    name = "triton"
    row_invariant = False
    has_fast_int8 = False
    has_float8 = True
    only_enqueues = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        """device: a CUDA device, or the CPU where kernels are interpreted."""
        self.device = torch.device(device)
        if self.device.type == "cuda":
            # Sums of 16-bit products are sums in fp32 to their end, as the interface says.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def describe(self) -> str:
        """See `Backend.describe`."""
        if self.device.type != "cuda":
            return f"triton ({self.device}, interpreted)"
        properties = torch.cuda.get_device_properties(self.device)
        return f"triton ({self.device}, {properties.name}, sm_{properties.major}{properties.minor})"

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> TorchLinear:
        return TorchLinear(weight, bias, out_dtype)

    def int8_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        group: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Int8Linear:
        return Int8Linear(weight, bias, dtype, group, out_dtype)

    def int4_linear(
        self,
        weight: Int4Weight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> W4A16Linear:
        return W4A16Linear(weight, bias, dtype, out_dtype)

    def fp8_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Fp8Linear:
        return Fp8Linear(weight, bias, dtype, out_dtype)

    def decoder_layers(
        self, embedding: Tensor, layers: Sequence[DecoderLayer], last_norm: Tensor, shape: DecoderShape
    ) -> ComposedLayers:
        return ComposedLayers(self, embedding, layers, last_norm, shape)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def rotary(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        rotary(x, positions, cos_sin)

    def kv_layout(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> KVLayout:
        return kv_layout(num_layers, num_kv_heads, head_dim, block_size, dtype)

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        write_kv(k, v, kv, slots)

    def rotary_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: LayerKV,
        slots: Tensor,
        *,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        return rotary_write_kv(qkv, positions, cos_sin, kv, slots, norms=norms, eps=eps)

    def paged_attention(
        self,
        q: Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return paged_attention(q, kv, batch, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        copy_blocks(pool, sources, targets)

    def move_blocks(self, source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor) -> None:
        move_blocks(source, source_blocks, target, target_blocks)

    def least_kept(self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        return least_kept(logits, temperatures, top_k, top_p, min_p)

    def linear_argmax(self, layer: Linear, x: Tensor) -> Tensor:
        zeros = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return gumbel_argmax(layer(x), zeros.to(torch.float32), zeros, zeros)

    def gumbel_argmax(
        self,
        logits: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        least: Tensor | None = None,
    ) -> Tensor:
        return gumbel_argmax(logits, temperatures, seeds, positions, least)

    def ban_tokens(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        ban_tokens(logits, rows, masks)

    def advance_decode(self, state: DecodeState, columns: DecodeColumns, inputs: DecodeInputs) -> None:
        advance_decode(state, columns, inputs)
