"""The interface every kernel backend implements, and the layout of the paged KV pool.

A backend is chosen by name once, at start (`octavo_kernels.load_backend`), and never changes silently. This
module states shapes, dtypes and mutation for every op; `reference.py` is the plain-torch oracle that
defines their values. It knows nothing of sequences, plans or workers.

Row invariance. On a backend whose `row_invariant` is true, every row of every op's output has the same bits
whatever rows stand beside it, and attention of one query token has the same bits whatever the block size, the
chunk it was computed in, or the other sequences in the batch. That is what makes a request's tokens
independent of batching.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.int4 import Int4Weight

if TYPE_CHECKING:
    from octavo_kernels.decode_state import DecodeColumns, DecodeInputs, DecodeState

QUANTIZED_LIMITS: Mapping[torch.dtype, float] = MappingProxyType({torch.int8: 127.0, torch.float8_e4m3fn: 448.0})
"""Dtypes that K and V can be quantized to, with the stored value that a scale's largest magnitude becomes."""
_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class KVLayout:
    """Shape of the paged KV pool.

    The pool is block-major: everything one block holds, for all layers, is contiguous, so that copying or swapping
    a block is one move. A tile is stored position by position, or transposed (`head_dim` before the position in the
    block), as `Backend.kv_layout` chooses for K and for V: on a CPU K is transposed, so that scores of consecutive
    positions are computed in consecutive lanes.

        pool                      (num_blocks, num_layers, 2, num_kv_heads, tile_size) of pool_dtype
        pool[b, l, 0, h]          K tile, (head_dim, block_size) if k_transposed else (block_size, head_dim)
        pool[b, l, 1, h]          V tile, (head_dim, block_size) if v_transposed else (block_size, head_dim)

    dtype is that of the stored K and V: the activations', or one of QUANTIZED_LIMITS. Then the pool is one of bytes,
    and behind each tile's block_size * head_dim values of one byte stand the fp32 scales of its block_size positions:
    4 * block_size bytes, in the machine's order. A value is what is stored times its position's scale.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    k_transposed: bool = True
    v_transposed: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether tiles carry scales."""
        return self.dtype in QUANTIZED_LIMITS

    @property
    def pool_dtype(self) -> torch.dtype:
        """Dtype of a pool tensor."""
        return torch.uint8 if self.is_quantized else self.dtype

    @property
    def tile_size(self) -> int:
        """Items of `pool_dtype` of one tile: K or V of one block, layer and head, its scales included."""
        return self.block_size * (self.head_dim + (_SCALE_BYTES if self.is_quantized else 0))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block, over all layers, scales included."""
        return 2 * self.num_layers * self.num_kv_heads * self.tile_size * self.pool_dtype.itemsize

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of a pool tensor of `num_blocks` blocks."""
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.tile_size)

    def layers(self, pool: Tensor) -> tuple[LayerKV, ...]:
        """The K and V views of every layer, no copy. To be made once for a pool: backends remember what they learn."""
        return tuple(self.layer(pool, index) for index in range(self.num_layers))

    def layer(self, pool: Tensor, layer: int) -> LayerKV:
        """The K and V views of one layer, no copy."""
        k_tiles, v_tiles = pool[:, layer, 0], pool[:, layer, 1]
        values = self.block_size * self.head_dim
        by_dim, by_position = (self.head_dim, self.block_size), (self.block_size, self.head_dim)
        k = k_tiles[..., :values].view(self.dtype).unflatten(-1, by_dim if self.k_transposed else by_position)
        v = v_tiles[..., :values].view(self.dtype).unflatten(-1, by_dim if self.v_transposed else by_position)
        k = k if self.k_transposed else k.transpose(-1, -2)
        v = v.transpose(-1, -2) if self.v_transposed else v
        if not self.is_quantized:
            return LayerKV(k=k, v=v)
        k_scales, v_scales = (tiles[..., values:].view(torch.float32) for tiles in (k_tiles, v_tiles))
        return LayerKV(k=k, v=v, k_scales=k_scales, v_scales=v_scales)


@dataclass(frozen=True)
class LayerKV:
    """Paged K and V of one layer; strided views into the pool, of these shapes whatever the layout.

    k:                  (num_blocks, num_kv_heads, head_dim, block_size)
    v:                  (num_blocks, num_kv_heads, block_size, head_dim)
    k_scales, v_scales: (num_blocks, num_kv_heads, block_size) fp32 where K and V are quantized, otherwise None
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


@dataclass(frozen=True)
class AttentionBatch:
    """Where the tokens of one forward pass stand: prefill chunks and decodes mixed.

    T tokens of S sequences, grouped by sequence, in order of position.

    positions:    (T,) int32, each token's position in its sequence
    slots:        (T,) int32, block_id * block_size + position % block_size: where its K and V go
    query_starts: (S + 1,) int32, sequence s owns tokens query_starts[s]:query_starts[s + 1]
    context_lens: (S,) int32, tokens of the sequence whose K and V are in the cache once this pass has written its own
    block_tables: (S, max_blocks) int32, rows padded with 0
    max_queries:  on the host, the most tokens that a sequence owns here, or a bound on it; None if it is not known, and
                  then taken to be T. Lets a device choose its kernels without being waited for.
    """

    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_queries: int | None = None


class Linear(Protocol):
    """A linear layer whose weights were prepared once for its backend; the caller may drop the original tensor."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias (+ residual)`.

        x: (T, in_features); residual: (T, out_features) or None, given up: the result may be written over it; None
        where the layer's out_dtype is not x's dtype. Returns (T, out_features) in the layer's out_dtype. Accumulates in
        fp32.
        """
        ...


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer of a decoder of the llama family, on their backend.

    input_norm, mlp_norm: (hidden,), gains; qkv: queries, keys and values side by side, in this order; q_norm, k_norm:
    (head_dim,), gains of the norms of every head's queries and keys, or None where the model has none; output, down:
    their results are added to the residual stream; gate_up: the gate first. sliding_window: see `paged_attention`.
    """

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    sliding_window: int | None


@dataclass(frozen=True)
class DecoderShape:
    """What all layers of a decoder have in common. scale: of attention's scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float


class DecoderLayers(Protocol):
    """A decoder but for its head, prepared once for its backend."""

    def __call__(
        self,
        token_ids: Tensor,
        rotary_positions: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        kv_layers: Sequence[LayerKV],
        on_progress: Callable[[], None],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Computes the layers one behind the other and writes their K and V into kv_layers, one a layer, all views of
        one pool.

        token_ids: (T,) int32, rows of the embedding; rotary_positions, cos_sin: see `Backend.rotary`; on_progress is
        called now and then; rows: (R,) int64, ascending, the tokens whose results are wanted: a last layer need not
        compute more of the others than their K and V. None: all T. Returns (R, hidden), the residual stream behind the
        last layer and the norm behind it, which the next call may overwrite.
        """
        ...


def results_dtype(out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a linear layer's results: out_dtype, or that of its activations for None. Raises
    InvalidArgumentError for one that no layer gives."""
    if out_dtype not in (None, dtype, torch.float32):
        raise InvalidArgumentError(f"out_dtype is {out_dtype}; it must be {dtype} or torch.float32")
    return out_dtype or dtype


class Backend(Protocol):
    """The ops a worker needs. All tensors live on `device`; activations share one dtype unless said otherwise.

    Every op checks what it is given and raises `errors.InvalidArgumentError`, a `ValueError`, naming the value.
    """

    name: str
    device: torch.device
    row_invariant: bool
    has_fast_int8: bool  # whether an `int8_linear` is faster than a `linear` of bfloat16
    has_float8: bool  # whether K and V can be kept in e4m3, and `fp8_linear` gives layers
    only_enqueues: bool  # whether no op waits for the device or looks at values there, as a CUDA graph needs it

    def describe(self) -> str:
        """The backend, where and how it computes and on how many threads, for people: "cpu (avx2, 4 threads)"."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Linear:
        """Prepares a linear layer. weight: (out_features, in_features); bias: (out_features,) or None; out_dtype: of
        its results, float32 or the weight's dtype, which None stands for.
        """
        ...

    def int8_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        group: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """Prepares a linear layer of 8-bit weights that quantizes its activations to 8 bits as it is called.

        weight: (out_features, in_features) of a float dtype, at most 131,072 in_features a group; bias: (out_features,)
        or None; dtype: of the activations; group: how many neighbouring activations of a row share a scale, a multiple
        of 64 (the last group may be shorter), or None for the whole row; out_dtype: of the results, float32 or dtype,
        which None stands for.

        Weights have one scale an output, activations one a row and group: the largest magnitude over 127. Values are
        divided by it and rounded to nearest even (Dettmers et al., LLM.int8(), section 2, "row-wise"). What is below
        2^-100 altogether becomes 0, and what holds a NaN or an infinity becomes NaN altogether. An output is the sum of
        its groups, first to last, fused multiply-adds in fp32 of the activations' scale and the group's dot product,
        which is an exact integer rounded to fp32 once; times the weights' scale; plus bias; plus residual. Each of
        these steps rounds in fp32.
        """
        ...

    def fp8_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """Prepares a linear layer of e4m3 weights that quantizes its activations to e4m3 as it is called (Micikevicius
        et al., FP8 formats for deep learning, 2022). Raises InvalidArgumentError where `has_float8` is false.

        weight: (out_features, in_features) of a float dtype; bias: (out_features,) or None; dtype: of the activations;
        out_dtype: of the results, float32 or dtype, which None stands for.

        Weights have one scale an output, activations one a row, and are stored by the rules of `write_kv`. An output is
        the dot product of a row's and an output's stored values, times the activations' scale, times the weights'
        scale; plus bias; plus residual. Each of these steps rounds in fp32; the dot product is summed in fp32, or, 128
        products at a time, in the fewer digits that a GPU's own units for e4m3 have.
        """
        ...

    def decoder_layers(
        self, embedding: Tensor, layers: Sequence[DecoderLayer], last_norm: Tensor, shape: DecoderShape
    ) -> DecoderLayers:
        """Prepares the layers of a decoder, whose linear layers are this backend's. Their values are those of the
        single ops in the order of `layers.ComposedLayers`, to the bit.

        embedding: (vocab_size, hidden) of the activations' dtype, where the residual stream begins; last_norm:
        (hidden,), gains of the norm behind the last layer.
        """
        ...

    def int4_linear(
        self,
        weight: Int4Weight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear:
        """Prepares a linear layer of 4-bit weights. A CPU's multiplies integers, a GPU's the activations as they are.

        bias: (out_features,) or None; dtype: of the activations; out_dtype: of the results, float32 or dtype, which
        None stands for.

        On a GPU the layer is `linear` of the weights' values, scale times integer plus minimum in fp32, rounded to
        dtype.

        On a CPU, and by the reference, activations are quantized to 8 bits as the layer is called, as those of
        `int8_linear`, with one scale a row and group of 32. A group adds two products to an output, by fused
        multiply-adds in fp32: first the activations' scale times the weights' scale times the groups' dot product, the
        last two of them multiplied and rounded first; then the weights' minimum times the sum of the group's
        activations, which is their scale times the sum of their integers, rounded. Dot products and sums of integers
        are exact. Groups are added first to last, to 0; plus bias; plus residual. Each of these steps rounds in fp32.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019).

        x: (..., n) contiguous in its last dimension; weight: (n,). Computed in fp32; returns a new tensor of x's dtype.
        """
        ...

    def rotary(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotates pairs (i, i + rotary_dim / 2) of each head in place (Su et al., RoFormer; the NeoX order of pairs).

        x: (T, num_heads, head_dim), last dimension contiguous; positions: (T,) int32; cos_sin: (max_positions,
        rotary_dim) fp32, cosines then sines. Dimensions beyond rotary_dim are left alone.
        """
        ...

    def kv_layout(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> KVLayout:
        """The layout of a pool of K and V that this backend reads fastest. See KVLayout for the arguments."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        """Stores each token's K and V in its slot, quantized where kv has scales. Mutates kv.

        k, v: (T, num_kv_heads, head_dim) of kv's dtype, or of any float dtype where kv is quantized, may be strided in
        dim 0; slots: (T,) int32, all different.

        Each token and head has one scale for K and one for V, the largest magnitude over the dtype's limit, 127 for
        int8 and 448 for e4m3. Values are multiplied by the limit over the largest magnitude, rounded to fp32, and
        rounded to the nearest stored value, ties to even. As in `int8_linear`,
        what is below 2^-100 altogether becomes 0 with scale 0, and what holds a NaN or an infinity becomes 0 with scale
        NaN. All of it in fp32, so that the stored bits are the same on every backend.
        """
        ...

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
        """What stands between a layer's projections and its attention: `rms_norm` of every head of Q and K where there
        are norms, `rotary` of both, and `write_kv`. Mutates kv, and may mutate qkv.

        qkv: (T, num_heads + 2 * num_kv_heads, head_dim), may be strided in dim 0; positions, slots: (T,) int32;
        cos_sin: see `rotary`; norms: the weights of Q and of K, (head_dim,) each, or None; eps: of the norms.
        Returns the queries, (T, num_heads, head_dim), which may be a view of qkv.
        """
        ...

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
        """Causal attention of every query token over its sequence's blocks (Kwon et al., SOSP 2023, section 4.1).

        q: (T, num_heads, head_dim), may be strided in dim 0; num_heads is a multiple of num_kv_heads and query heads
        are grouped by KV head (Ainslie et al., GQA); of kv's dtype, or of any float dtype where kv is quantized. A
        token at position p attends to positions max(0, p - sliding_window + 1)..p. A sequence's tokens have consecutive
        positions; it may own none. Softmax and accumulation in fp32. Returns a new contiguous (T, num_heads * head_dim)
        of q's dtype.

        soft_cap: scores become soft_cap * tanh(score / soft_cap) once they are scaled (Gemma 2), or None. sinks:
        (num_heads,) fp32, a further score of each query head that takes its share of the softmax and brings no value
        (Xiao et al., StreamingLLM; gpt-oss), neither scaled nor capped, or None. A backend that offers one of them not
        raises InvalidArgumentError.

        Quantized K and V count as their stored values times their scales. A backend may bring the scales to the other
        side, K's to a position's score and V's to its probability, and round what it multiplies the stored values by:
        to q's dtype, or to 16-bit integers with one scale, largest magnitude over 32,767, for each head's query and for
        the probabilities of each 128 positions.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` (Shazeer, GLU variants). gate_up: (T, 2 * n), gate first. Returns a new (T, n)."""
        ...

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        """pool[targets[i]] = pool[sources[i]]. Mutates pool.

        sources, targets: (n,) int64 on the CPU, disjoint; no target twice.
        """
        ...

    def move_blocks(self, source: Tensor, source_blocks: Tensor, target: Tensor, target_blocks: Tensor) -> None:
        """target[target_blocks[i]] = source[source_blocks[i]] between two pools of one layout (swap). Mutates target.

        source_blocks, target_blocks: (n,) int64 on the CPU; no target twice. On the CPU the move is over on return.
        Between another device and pinned memory of the host it runs on the device's current stream, and the caller
        orders it against what uses the blocks.
        """
        ...

    def least_kept(self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """The least logit that top-k, top-p and min-p keep in each row, for `gumbel_argmax`.

        logits: (S, vocab) fp32, -inf for banned ids, not mutated; temperatures: (S,) fp32; top_k: (S,) int64, 0 for
        all; top_p: (S,) fp32, 1 for all; min_p: (S,) fp32, 0 for all. They hold in this order: top-p is a share of what
        top-k leaves, of probabilities at the row's temperature; min-p is a share of the likeliest token's. What equals
        the least is kept too, so that the order of equals never matters, and the likeliest is always kept.

        Returns (S,) fp32, -inf for rows that keep all and for those at temperature 0. Masses are sums in at least fp32,
        so that where one meets its share within rounding, backends may differ by a token.
        """
        ...

    def linear_argmax(self, layer: Linear, x: Tensor) -> Tensor:
        """The greatest result of a linear layer in each row: what `gumbel_argmax` gives of `layer(x)` at temperature 0,
        but the results themselves need never lie in memory.

        layer: of this backend, with results of fp32; x: (T, in_features), as the layer takes it. Returns (T,) int64,
        the lowest column of several; -1 for a row that has a NaN, a +inf or nothing but -inf.
        """
        ...

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, least: Tensor | None = None
    ) -> Tensor:
        """Samples one id a row: arg max of (logits - max) / temperature + Gumbel noise (the Gumbel-max trick).

        logits: (S, vocab) fp32, -inf for banned ids, not mutated; temperatures: (S,) fp32, 0 means plain arg max of the
        logits; seeds: (S,) int64, the 64 bits of the key, low word first; positions: (S,) int64; least: (S,) fp32, a
        row's logits below it count as -inf, or None. Ties go to the lowest id. The noise of id v is drawn from
        Philox4x32-10 (Salmon et al., SC 2011) with key = seed and counter = (v // 4, 0, position low, position high),
        lane v % 4: u = (word >> 8) * 2^-24 + 2^-25, exactly (in fp32 the largest would round to 1 and its noise be
        infinite), noise = -log(-log(u)), rounded to fp32.

        Returns (S,) int64; -1 for a row that has a NaN, a +inf or nothing but -inf, so that its sequence alone fails. A
        temperature that is negative or NaN raises, or gives -1 where the backend `only_enqueues`.
        """
        ...

    def ban_tokens(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """logits[rows[i], v] = -inf for every id v whose bit in masks[i] is 0. Mutates logits.

        logits: (S, vocab) fp32; rows: (n,) int64, all different; masks: (n, words) int32 with at least vocab / 32
        words, in which bit v % 32 of word v // 32, the lowest first, stands for id v. Bits beyond the vocabulary are
        not looked at.
        """
        ...

    def advance_decode(self, state: DecodeState, columns: DecodeColumns, inputs: DecodeInputs) -> None:
        """Makes a decode step's inputs out of the plan's columns and what the device remembers (`decode_state`).

        Brings the new blocks into the rows of state.block_tables, then fills the first B lanes of the inputs: a lane
        of a sequence gets its token (the state's last one for FROM_STATE), position, context (position + 1), slot and
        block table, of which entries beyond its blocks are anything; a lane of PADDING gets token 0 at position 0 with
        a context of 1 in the scratch block, and slot lane % block_size of it. Mutates state and inputs.
        """
        ...
