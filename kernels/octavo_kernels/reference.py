"""The oracle: every op in plain torch, on any device and in any float dtype.

Written to be read and to be right. 16-bit inputs are computed in fp32 and rounded once, float64 in float64. It also
serves where nothing faster runs. Not row-invariant: torch picks the order of a matrix product by its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.backend import (
    QUANTIZED_LIMITS,
    AttentionBatch,
    DecoderLayer,
    DecoderShape,
    KVLayout,
    LayerKV,
    Linear,
)
from octavo_kernels.composed import rotary_write_kv
from octavo_kernels.decode_state import DecodeColumns, DecodeInputs, DecodeState, advance_decode
from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.filters import least_kept, without_least
from octavo_kernels.int4 import Int4Weight
from octavo_kernels.layers import ComposedLayers
from octavo_kernels.philox import gumbel_noise
from octavo_kernels.reference_linear import (
    ReferenceFp8Linear,
    ReferenceInt4Linear,
    ReferenceInt8Linear,
    ReferenceLinear,
    scale_rows,
    wide,
)

# Elements of one intermediate tensor of attention: bounds its memory.
_TILE_ELEMENTS = 1 << 25


class ReferenceBackend:
    """See `octavo_kernels.backend.Backend` for the ops."""

    name = "reference"
    row_invariant = False
    has_fast_int8 = False
    has_float8 = True
    only_enqueues = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def describe(self) -> str:
        """See `Backend.describe`."""
        threads = torch.get_num_threads()
        on_cpu = f", {threads} thread{'' if threads == 1 else 's'}" if self.device.type == "cpu" else ""
        return f"reference ({self.device}{on_cpu})"

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> ReferenceLinear:
        return ReferenceLinear(weight, bias, out_dtype)

    def int8_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        group: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> ReferenceInt8Linear:
        return ReferenceInt8Linear(weight, bias, dtype, group, out_dtype)

    def fp8_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> ReferenceFp8Linear:
        return ReferenceFp8Linear(weight, bias, dtype, out_dtype)

    def decoder_layers(
        self, embedding: Tensor, layers: Sequence[DecoderLayer], last_norm: Tensor, shape: DecoderShape
    ) -> ComposedLayers:
        return ComposedLayers(self, embedding, layers, last_norm, shape)

    def int4_linear(
        self,
        weight: Int4Weight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> ReferenceInt4Linear:
        return ReferenceInt4Linear(weight, bias, dtype, out_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.shape != x.shape[-1:]:
            raise InvalidArgumentError(f"weight has shape {tuple(weight.shape)}; {tuple(x.shape[-1:])} is needed")
        widened = wide(x)
        scale = torch.rsqrt(widened.square().mean(dim=-1, keepdim=True) + eps)
        return (widened * scale * wide(weight)).to(x.dtype)

    def rotary(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        max_positions, rotary_dim = cos_sin.shape
        _check_range("position", positions, max_positions)
        if rotary_dim > x.shape[2] or rotary_dim % 2 != 0:
            raise InvalidArgumentError(
                f"rotary_dim is {rotary_dim}; it must be even and at most head_dim, {x.shape[2]}"
            )
        cos, sin = cos_sin[positions.long(), None].to(wide(x).dtype).chunk(2, dim=-1)  # (T, 1, rotary_dim / 2)
        a, b = wide(x[..., :rotary_dim]).chunk(2, dim=-1)
        x[..., :rotary_dim] = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def kv_layout(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> KVLayout:
        return KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype)

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        num_blocks, block_size = kv.k.shape[0], kv.k.shape[3]
        _check_range("slot", slots, num_blocks * block_size)
        blocks, offsets = slots.long() // block_size, slots.long() % block_size
        if kv.k_scales is not None and kv.v_scales is not None:
            k, kv.k_scales[blocks, :, offsets] = _quantize_heads(k, kv.k.dtype)
            v, kv.v_scales[blocks, :, offsets] = _quantize_heads(v, kv.v.dtype)
        stored_k, stored_v = (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in (kv.k, kv.v))
        stored_k[blocks, :, :, offsets] = k
        stored_v[blocks, :, offsets] = v

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
        return rotary_write_kv(self, qkv, positions, cos_sin, kv, slots, norms, eps)

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
        if sliding_window is not None and sliding_window < 1:
            raise InvalidArgumentError(f"sliding_window is {sliding_window}; it must be at least 1, or None")
        if soft_cap is not None and not soft_cap > 0:
            raise InvalidArgumentError(f"soft_cap is {soft_cap}; it must be positive, or None")
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise InvalidArgumentError(f"sinks has shape {tuple(sinks.shape)}; ({q.shape[1]},) is needed")
        _check_range("block", batch.block_tables, kv.k.shape[0])
        softmax = _Softmax(scale, sliding_window, soft_cap, sinks)
        tokens, heads, head_dim = q.shape
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
        # Every sequence's first tokens together, then the next ones of those that have more: decodes are not padded
        # to the length of a prefill.
        longest = int((batch.query_starts[1:] - batch.query_starts[:-1]).max()) if len(batch.context_lens) else 0
        for begin, end in _tiles(longest):
            counts = batch.query_starts[1:] - batch.query_starts[:-1]
            active = torch.nonzero(counts > begin).flatten()
            for sequences in active.split(_sequences_at_once(q, kv, batch, end - begin)):
                _attend(q, kv, batch, sequences, begin, end, softmax, out)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = wide(gate_up).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        self.move_blocks(pool, sources, pool, targets)

    def move_blocks(self, source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor) -> None:
        _check_range("source block", source_blocks, source.shape[0])
        _check_range("target block", target_blocks, target.shape[0])
        if source.device == target.device:
            target[target_blocks.to(target.device)] = source[source_blocks.to(source.device)]
            return
        for first, to, count in runs(source_blocks.tolist(), target_blocks.tolist()):
            target[to : to + count].copy_(source[first : first + count], non_blocking=True)

    def least_kept(self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        return least_kept(logits, temperatures, top_k, top_p, min_p)

    def linear_argmax(self, layer: Linear, x: Tensor) -> Tensor:
        results = layer(x)
        if results.dtype is not torch.float32:
            raise InvalidArgumentError(f"the layer gives {results.dtype}; what is compared must be float32")
        return _finite_argmax(results)

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, least: Tensor | None = None
    ) -> Tensor:
        if bool((~(temperatures >= 0)).any()):
            raise InvalidArgumentError(f"temperatures are {temperatures.tolist()}; none may be negative or NaN")
        logits = without_least(logits, least)
        greedy = temperatures == 0
        top = logits.amax(dim=-1, keepdim=True)
        divisor = torch.where(greedy, 1.0, temperatures)[:, None]
        noise = gumbel_noise(seeds, positions, logits.shape[1])
        scores = (logits - top) / divisor + torch.where(greedy[:, None], 0.0, noise)
        return torch.where(top[:, 0].isfinite(), _first_argmax(scores), -1)

    def ban_tokens(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        vocab = logits.shape[1]
        wrong_shape = masks.dim() != 2 or len(masks) != len(rows) or masks.shape[1] * 32 < vocab
        if masks.dtype is not torch.int32 or wrong_shape:
            raise InvalidArgumentError(
                f"masks has shape {tuple(masks.shape)} and dtype {masks.dtype}; "
                f"({len(rows)}, {-(-vocab // 32)} or more) of torch.int32 is needed"
            )
        _check_range("row", rows, logits.shape[0])
        bits = (masks.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=masks.device)) & 1
        banned = bits.flatten(1)[:, :vocab] == 0
        logits[rows] = logits[rows].masked_fill(banned, float("-inf"))

    def advance_decode(self, state: DecodeState, columns: DecodeColumns, inputs: DecodeInputs) -> None:
        advance_decode(state, columns, inputs)


def runs(sources: list[int], targets: list[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, length) of the stretches in which both ids grow by one: each is one copy."""
    begin = 0
    for end in range(1, len(sources) + 1):
        if end < len(sources) and sources[end] == sources[end - 1] + 1 and targets[end] == targets[end - 1] + 1:
            continue
        yield sources[begin], targets[begin], end - begin
        begin = end


def _finite_argmax(logits: Tensor) -> Tensor:
    return torch.where(logits.amax(dim=-1).isfinite(), _first_argmax(logits), -1)


def _first_argmax(scores: Tensor) -> Tensor:
    """The lowest index of a row's largest value; torch.argmax promises none in particular."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    is_top = scores == scores.amax(dim=-1, keepdim=True)
    return torch.where(is_top, columns, scores.shape[1]).amin(dim=-1)


def _check_range(name: str, ids: Tensor, end: int) -> None:
    outside = ids[(ids < 0) | (ids >= end)]
    if outside.numel() > 0:
        raise InvalidArgumentError(f"{name} {int(outside[0])} is outside 0..{end - 1}")


def _tiles(length: int) -> Iterator[tuple[int, int]]:
    """Ranges of query tokens within their sequences: one, a few, then 64 at a time."""
    begin = 0
    while begin < length:
        end = min(length, begin + (1 if begin == 0 else 15 if begin == 1 else 64))
        yield begin, end
        begin = end


def _quantize_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stored values and fp32 scales of every token's heads, by the rules of `Backend.write_kv`.

    x: (T, heads, head_dim). Returns (T, heads, head_dim) int8, or the bits of e4m3 as uint8, and (T, heads) fp32.
    """
    values, scales = scale_rows(x.flatten(0, 1).to(torch.float32), x.shape[2], QUANTIZED_LIMITS[dtype])
    stored = values.to(dtype).view(torch.uint8) if dtype is torch.float8_e4m3fn else values.round().to(torch.int8)
    return stored.view(x.shape), scales.view(x.shape[:2])


def _gather(stored: Tensor, blocks: Tensor) -> Tensor:
    """stored[blocks], widened; torch has no indexing of 8-bit floats."""
    if stored.dtype is torch.float8_e4m3fn:
        return stored.view(torch.uint8)[blocks].view(torch.float8_e4m3fn).to(torch.float32)
    return wide(stored[blocks])


def _sequences_at_once(q: Tensor, kv: LayerKV, batch: AttentionBatch, queries: int) -> int:
    context = batch.block_tables.shape[1] * kv.k.shape[3]
    widest = max(q.shape[1] * queries * context, kv.k.shape[1] * kv.k.shape[2] * context)
    return max(1, _TILE_ELEMENTS // max(1, widest))


@dataclass(frozen=True)
class _Softmax:
    """From products of queries and keys to weights, by the rules of `Backend.paged_attention`."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: Tensor | None

    def __call__(self, products: Tensor, visible: Tensor) -> Tensor:
        """products: (s, h, g, n, c); visible: broadcast to it."""
        scores = products * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is None:
            return scores.softmax(dim=-1)
        sinks = self.sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _attend(
    q: Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    sequences: Tensor,
    begin: int,
    end: int,
    softmax: _Softmax,
    out: Tensor,
) -> None:
    """Attention of tokens begin:end of the given sequences, padded to a rectangle; writes their rows of out.

    s: sequences, n: tokens of each, h: KV heads, g: query heads of a KV head, c: positions, d: head_dim.
    """
    starts = batch.query_starts[sequences].long()
    counts = batch.query_starts[sequences + 1].long() - starts
    index = torch.arange(begin, end, device=q.device)
    exists = index < counts[:, None]  # (s, n)
    tokens = torch.where(exists, starts[:, None] + index, starts[:, None])
    context_lens = batch.context_lens[sequences].long()
    block_size = kv.k.shape[3]
    blocks = batch.block_tables[sequences, : -(-int(context_lens.max()) // block_size)].long()
    k = _gather(kv.k, blocks).permute(0, 2, 3, 1, 4).flatten(3)  # (s, h, d, c)
    v = _gather(kv.v, blocks).permute(0, 2, 1, 3, 4).flatten(2, 3)  # (s, h, c, d)
    if kv.k_scales is not None and kv.v_scales is not None:
        k = k * kv.k_scales[blocks].transpose(1, 2).flatten(2)[:, :, None]
        v = v * kv.v_scales[blocks].transpose(1, 2).flatten(2)[..., None]
    column = torch.arange(k.shape[3], device=q.device)
    # What lies behind a context is anything at all, NaN included.
    v = v.masked_fill((column >= context_lens[:, None])[:, None, :, None], 0.0)
    heads = k.shape[1]
    query = wide(q[tokens]).unflatten(2, (heads, -1))  # (s, n, h, g, d)
    position = batch.positions[tokens].long()[..., None]  # (s, n, 1)
    visible = column <= position
    if softmax.sliding_window is not None:
        visible &= column > position - softmax.sliding_window
    weights = softmax(torch.einsum("snhgd,shdc->shgnc", query, k), visible[:, None, None])
    result = torch.einsum("shgnc,shcd->snhgd", weights, v).flatten(2, 3)
    out[tokens[exists]] = result[exists].to(out.dtype)
