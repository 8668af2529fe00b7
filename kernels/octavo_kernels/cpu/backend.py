"""The native CPU backend: checks tensors, allocates results and calls the C++ kernels.

On the path of every op of every layer, so checks are few and cheap, and nothing is copied that need not be.
What the checks here leave out (ids, positions, slots) the library checks itself.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, DecoderLayer, DecoderShape, KVLayout, LayerKV, Linear
from octavo_kernels.composed import rotary_write_kv
from octavo_kernels.cpu.checks import DTYPES, check_batch, check_column, check_rotary_table, dtype_code, refuse
from octavo_kernels.cpu.layers import CpuDecoderLayers
from octavo_kernels.cpu.library import PagedKV, choose_isa, load_library
from octavo_kernels.cpu.linear import CpuLinear
from octavo_kernels.cpu.topology import usable_cores
from octavo_kernels.decode_state import DecodeColumns, DecodeInputs, DecodeState, advance_decode
from octavo_kernels.errors import InvalidArgumentError, KernelError
from octavo_kernels.filters import least_kept, without_least
from octavo_kernels.int4 import Int4Weight

_INT8 = 3  # K and V with scales; see csrc/common.h
# The longest head whose K and V may be of 8 bits.
_MOST_INT8_HEAD_DIM = 512
# What a status of the library is here; any other is a KernelError.
_ERRORS: dict[int, type[Exception]] = {1: InvalidArgumentError, 2: MemoryError}
# How long an idle thread spins before it sleeps: bridges the gap between two ops, not the one between two steps.
DEFAULT_SPIN_US = 50


class CpuBackend:
    """See `octavo_kernels.backend.Backend` for the ops.

    isa: one of `library.supported_isas()`; None takes OCTAVO_CPU_ISA or the most capable. spin_us: microseconds that an
    idle thread spins before it sleeps. Calls from several threads are allowed and run one after another; they release
    the interpreter's lock.
    """

    name = "cpu"
    row_invariant = True
    has_fast_int8 = True
    has_float8 = False
    only_enqueues = False

    def __init__(
        self, *, num_threads: int | None = None, isa: str | None = None, spin_us: int = DEFAULT_SPIN_US
    ) -> None:
        self.device = torch.device("cpu")
        self.num_threads = usable_cores() if num_threads is None else num_threads
        self.isa = choose_isa(isa)
        self.library = load_library()
        self.context = ctypes.c_void_p()
        self.check(
            self.library.octavo_context_create(self.isa.encode(), self.num_threads, spin_us, ctypes.byref(self.context))
        )
        # Not at exit: another thread may still be in a call, and sleeping threads end with the process.
        weakref.finalize(self, self.library.octavo_context_destroy, self.context).atexit = False
        self._paged: dict[int, tuple[weakref.ref[LayerKV], PagedKV]] = {}

    def describe(self) -> str:
        """See `Backend.describe`."""
        return f"cpu ({self.isa}, {self.num_threads} thread{'' if self.num_threads == 1 else 's'})"

    def check(self, status: int) -> None:
        if status != 0:
            error = _ERRORS.get(status, KernelError)
            raise error(self.library.octavo_last_error().decode())

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> CpuLinear:
        """Packs `weight` into panels; the layer keeps the weight's dtype."""
        return CpuLinear(self, weight, bias, weight.dtype, out_dtype=out_dtype)

    def int8_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        group: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> CpuLinear:
        """Quantizes `weight` and packs it into panels."""
        whole = (weight.shape[-1] + 63) // 64 * 64
        return CpuLinear(
            self, weight.to(torch.float32), bias, dtype, group=whole if group is None else group, out_dtype=out_dtype
        )

    def fp8_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> CpuLinear:
        raise InvalidArgumentError(
            "the cpu backend has no linear layers of 8-bit floats; those of int8 take as much memory"
        )

    def decoder_layers(
        self, embedding: Tensor, layers: Sequence[DecoderLayer], last_norm: Tensor, shape: DecoderShape
    ) -> CpuDecoderLayers:
        return CpuDecoderLayers(self, embedding, layers, last_norm, shape)

    def int4_linear(
        self,
        weight: Int4Weight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> CpuLinear:
        """Packs `weight` into panels, its groups as they are."""
        return CpuLinear(self, weight, bias, dtype, out_dtype=out_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        code = dtype_code(x, "x")
        n = x.shape[-1]
        if x.stride(-1) != 1:
            refuse("x", x, "the last dimension must be contiguous")
        if weight.shape != (n,) or weight.stride(0) != 1 or weight.dtype not in (x.dtype, torch.float32):
            refuse("weight", weight, f"a contiguous ({n},) of {x.dtype} or float32 is needed")
        inner, inner_stride = 1, 0
        if x.dim() == 2:
            outer, outer_stride = x.shape[0], x.stride(0)
        elif x.dim() == 3:
            outer, inner = x.shape[0], x.shape[1]
            outer_stride, inner_stride = x.stride(0), x.stride(1)
        else:
            x = x.contiguous()
            outer, outer_stride = x.numel() // n, n
        out = torch.empty(x.shape, dtype=x.dtype)
        if out.numel() == 0:
            return out
        self.check(
            self.library.octavo_rms_norm(
                self.context,
                code,
                DTYPES[weight.dtype],
                x.data_ptr(),
                outer,
                outer_stride,
                inner,
                inner_stride,
                n,
                weight.data_ptr(),
                eps,
                out.data_ptr(),
            )
        )
        return out

    def rotary(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        code = dtype_code(x, "x")
        if x.dim() != 3 or x.stride(2) != 1:
            refuse("x", x, "(tokens, heads, head_dim), the last contiguous, is needed")
        tokens, heads, head_dim = x.shape
        check_column(positions, "positions", tokens, torch.int32)
        max_positions, rotary_dim = check_rotary_table(cos_sin, head_dim)
        self.check(
            self.library.octavo_rotary(
                self.context,
                code,
                x.data_ptr(),
                tokens,
                x.stride(0),
                heads,
                x.stride(1),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                max_positions,
                rotary_dim,
            )
        )

    def kv_layout(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> KVLayout:
        if dtype is torch.float8_e4m3fn:
            raise InvalidArgumentError("the cpu backend stores no K and V in 8-bit floats; int8 takes as much memory")
        return KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype)

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        paged = self.paged_kv(kv)
        tokens, dtype = k.shape[0], _given_dtype(kv, k, "k")
        heads, head_dim = kv.k.shape[1], kv.k.shape[2]
        for name, tensor in (("k", k), ("v", v)):
            if (
                tensor.shape != (tokens, heads, head_dim)
                or tensor.dtype is not dtype
                or tensor.stride(2) != 1
                or (heads > 1 and tensor.stride(1) != head_dim)
            ):
                refuse(name, tensor, f"({tokens}, {heads}, {head_dim}) of {dtype}, strided in dim 0, is needed")
        check_column(slots, "slots", tokens, torch.int32)
        self.check(
            self.library.octavo_write_kv(
                self.context,
                paged,
                DTYPES[dtype],
                k.data_ptr(),
                k.stride(0),
                v.data_ptr(),
                v.stride(0),
                slots.data_ptr(),
                tokens,
            )
        )

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
        if soft_cap is not None or sinks is not None:
            name = "soft_cap" if soft_cap is not None else "sinks"
            raise InvalidArgumentError(f"the cpu backend has no attention with {name}; the reference backend does")
        paged = self.paged_kv(kv)
        kv_heads, head_dim = kv.k.shape[1], kv.k.shape[2]
        dtype = _given_dtype(kv, q, "q")
        if q.dim() != 3 or q.shape[2] != head_dim or q.dtype is not dtype or q.shape[1] % kv_heads != 0:
            refuse("q", q, f"(tokens, a multiple of {kv_heads}, {head_dim}) of {dtype} is needed")
        tokens, heads = q.shape[0], q.shape[1]
        if q.stride(2) != 1 or (heads > 1 and q.stride(1) != head_dim):
            refuse("q", q, "only the first dimension may be strided")
        if sliding_window is not None and sliding_window < 1:
            raise InvalidArgumentError(f"sliding_window is {sliding_window}; it must be at least 1, or None")
        check_batch(batch, tokens)
        tables = batch.block_tables
        out = torch.empty((tokens, heads * head_dim), dtype=q.dtype)
        self.check(
            self.library.octavo_paged_attention(
                self.context,
                paged,
                DTYPES[dtype],
                q.data_ptr(),
                q.stride(0),
                tokens,
                heads,
                tables.shape[0],
                batch.positions.data_ptr(),
                batch.query_starts.data_ptr(),
                batch.context_lens.data_ptr(),
                tables.data_ptr(),
                tables.stride(0),
                tables.shape[1],
                scale,
                sliding_window or 0,
                out.data_ptr(),
            )
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        code = dtype_code(gate_up, "gate_up")
        if gate_up.dim() != 2 or gate_up.stride(1) != 1 or gate_up.shape[1] % 2 != 0:
            refuse("gate_up", gate_up, "(tokens, 2 * n), the last dimension contiguous, is needed")
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, n), dtype=gate_up.dtype)
        if out.numel() > 0:
            self.check(
                self.library.octavo_silu_mul(
                    self.context, code, gate_up.data_ptr(), rows, gate_up.stride(0), n, out.data_ptr()
                )
            )
        return out

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        self.move_blocks(pool, sources, pool, targets)

    def move_blocks(self, source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor) -> None:
        if source.shape[1:] != target.shape[1:] or source.dtype is not target.dtype:
            refuse("target", target, f"blocks of {tuple(source.shape[1:])} of {source.dtype} are needed")
        for name, pool in (("source", source), ("target", target)):
            if not pool.is_contiguous() or pool.device.type != "cpu":
                refuse(name, pool, "a contiguous pool on the CPU is needed")
        count = source_blocks.shape[0]
        check_column(source_blocks, "source_blocks", count, torch.int64)
        check_column(target_blocks, "target_blocks", count, torch.int64)
        if count == 0:
            return
        block_bytes = source[0].numel() * source.element_size()
        self.check(
            self.library.octavo_move_blocks(
                self.context,
                source.data_ptr(),
                source.shape[0],
                source_blocks.data_ptr(),
                target.data_ptr(),
                target.shape[0],
                target_blocks.data_ptr(),
                count,
                block_bytes,
            )
        )

    def least_kept(self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        return least_kept(logits, temperatures, top_k, top_p, min_p)

    def linear_argmax(self, layer: Linear, x: Tensor) -> Tensor:
        if not isinstance(layer, CpuLinear):
            raise InvalidArgumentError(f"layer is a {type(layer).__name__}; one of the cpu backend is needed")
        return layer.argmax(x)

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, least: Tensor | None = None
    ) -> Tensor:
        if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.stride(1) != 1 or logits.shape[1] == 0:
            refuse("logits", logits, "(rows, vocab) of float32, the last dimension contiguous, is needed")
        rows, vocab = logits.shape
        logits = without_least(logits, least)
        check_column(temperatures, "temperatures", rows, torch.float32)
        check_column(seeds, "seeds", rows, torch.int64)
        check_column(positions, "positions", rows, torch.int64)
        out = torch.empty(rows, dtype=torch.int64)
        self.check(
            self.library.octavo_gumbel_argmax(
                self.context,
                logits.data_ptr(),
                rows,
                logits.stride(0),
                vocab,
                temperatures.data_ptr(),
                seeds.data_ptr(),
                positions.data_ptr(),
                out.data_ptr(),
            )
        )
        return out

    def ban_tokens(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
            refuse("logits", logits, "(rows, vocab) of float32, the last dimension contiguous, is needed")
        num_rows, vocab = logits.shape
        count = rows.shape[0]
        check_column(rows, "rows", count, torch.int64)
        wrong_shape = masks.dim() != 2 or masks.shape[0] != count or masks.shape[1] * 32 < vocab
        if masks.dtype is not torch.int32 or wrong_shape or not masks.is_contiguous():
            refuse("masks", masks, f"contiguous ({count}, {-(-vocab // 32)} or more) of torch.int32 is needed")
        self.check(
            self.library.octavo_ban_tokens(
                self.context,
                logits.data_ptr(),
                num_rows,
                logits.stride(0),
                vocab,
                rows.data_ptr(),
                count,
                masks.data_ptr(),
                masks.shape[1],
            )
        )

    def advance_decode(self, state: DecodeState, columns: DecodeColumns, inputs: DecodeInputs) -> None:
        advance_decode(state, columns, inputs)  # nothing is ahead of a CPU, so there is no time to win

    def paged_kv(self, kv: LayerKV) -> PagedKV:
        """The layer's description for the library; made once while the layer lives."""
        known = self._paged.get(id(kv))
        if known is not None and known[0]() is kv:
            return known[1]
        paged = _describe_kv(kv)
        key, table = id(kv), self._paged
        table[key] = (weakref.ref(kv, lambda _: table.pop(key, None)), paged)
        return paged


def _given_dtype(kv: LayerKV, tensor: Tensor, name: str) -> torch.dtype:
    """What a tensor beside kv must be of: kv's dtype, or its own where K and V are quantized."""
    if kv.k_scales is None:
        return kv.k.dtype
    dtype_code(tensor, name)
    return tensor.dtype


def _describe_kv(kv: LayerKV) -> PagedKV:
    k, v = kv.k, kv.v
    code = _INT8 if kv.k_scales is not None else dtype_code(k, "kv.k")
    if k.dim() != 4 or v.shape != (k.shape[0], k.shape[1], k.shape[3], k.shape[2]) or v.dtype is not k.dtype:
        refuse("kv.v", v, f"it must match kv.k of shape {tuple(k.shape)} and dtype {k.dtype}")
    num_blocks, heads, head_dim, block_size = k.shape
    if block_size % 8 != 0:
        raise InvalidArgumentError(f"block_size is {block_size}; the cpu backend takes multiples of 8")
    if k.stride()[2:] != (block_size, 1) or v.stride()[2:] != (head_dim, 1) or k.stride()[:2] != v.stride()[:2]:
        refuse("kv.k", k, "the tiles of K and V must be contiguous and laid out alike")
    if code == _INT8:
        _check_quantized(kv)
    return PagedKV(code, k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), num_blocks, heads, head_dim, block_size)


def _check_quantized(kv: LayerKV) -> None:
    """The library finds scales behind their tiles."""
    if kv.k.dtype is not torch.int8 or kv.k.device.type != "cpu":
        refuse("kv.k", kv.k, "the cpu backend takes quantized K and V of int8 on the CPU")
    if kv.k.shape[2] > _MOST_INT8_HEAD_DIM:
        raise InvalidArgumentError(
            f"head_dim is {kv.k.shape[2]}; the cpu backend quantizes K and V of heads up to {_MOST_INT8_HEAD_DIM}"
        )
    for name, values, scales in (("k_scales", kv.k, kv.k_scales), ("v_scales", kv.v, kv.v_scales)):
        shape = (*values.shape[:2], kv.k.shape[3])
        if scales is None or scales.shape != shape or scales.dtype is not torch.float32:
            raise InvalidArgumentError(f"kv.{name} does not fit kv; {shape} of torch.float32 is needed")
        behind = values.data_ptr() + values.shape[2] * values.shape[3]
        # The stride of a single block or head is anything at all.
        strided_alike = all(
            size == 1 or 4 * stride == wanted
            for size, stride, wanted in zip(shape, scales.stride(), (*values.stride()[:2], 4), strict=True)
        )
        if not strided_alike or scales.data_ptr() != behind:
            refuse(f"kv.{name}", scales, "the scales must stand right behind their tiles, as in a pool of KVLayout")
