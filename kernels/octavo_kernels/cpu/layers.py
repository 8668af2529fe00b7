"""A decoder but for its head in one native call: no dispatch, no allocation and no lock of Python's between its ops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, DecoderLayer, DecoderShape, LayerKV
from octavo_kernels.cpu.checks import DTYPES, check_batch, check_column, check_rotary_table, refuse
from octavo_kernels.cpu.library import DecoderLayerPointers, DecoderPass, DecoderStruct, PagedKV
from octavo_kernels.cpu.linear import CpuLinear
from octavo_kernels.errors import InvalidArgumentError

if TYPE_CHECKING:
    from octavo_kernels.cpu.backend import CpuBackend

# So many tokens take long enough for one call a layer, which lets the caller show that it gets on.
_MANY_TOKENS = 64


class CpuDecoderLayers:
    """See `octavo_kernels.backend.DecoderLayers`. Keeps the layers and what is on both sides of them."""

    def __init__(
        self,
        backend: CpuBackend,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        last_norm: Tensor,
        shape: DecoderShape,
    ) -> None:
        if not layers:
            raise InvalidArgumentError("layers is empty; at least one is needed")
        self._backend, self._layers, self._shape = backend, tuple(layers), shape
        self._embedding, self._last_norm = embedding, last_norm
        first = self._layers[0]
        self._hidden = first.qkv.in_features
        self._dtype = _linear(first.qkv, "qkv").dtype
        inner = first.down.in_features
        for layer in self._layers:
            self._check_layer(layer, inner)
        fits = embedding.dtype is self._dtype and embedding.shape[1:] == (self._hidden,)
        if not fits or not embedding.is_contiguous():
            refuse("embedding", embedding, f"a contiguous (vocab_size, {self._hidden}) of {self._dtype} is needed")
        check_column(last_norm, "last_norm", self._hidden, first.input_norm.dtype)
        self._struct = DecoderStruct(
            DTYPES[self._dtype],
            DTYPES[first.input_norm.dtype],
            self._hidden,
            inner,
            shape.num_heads,
            shape.norm_eps,
            shape.scale,
            embedding.data_ptr(),
            embedding.shape[0],
            (DecoderLayerPointers * len(layers))(*map(_pointers, self._layers)),
            len(layers),
            last_norm.data_ptr(),
        )
        self._x = torch.empty((0, self._hidden), dtype=self._dtype)
        self._kv_layers: Sequence[LayerKV] | None = None
        self._paged = (PagedKV * 0)()

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
        tokens = token_ids.shape[0]
        x = self._x
        if x.shape[0] != tokens:
            # Kept from step to step: making one lets go of Python's lock, for which the network's thread waits by now.
            x = self._x = torch.empty((tokens, self._hidden), dtype=self._dtype)
        if tokens == 0:
            return x
        check_column(token_ids, "token_ids", tokens, torch.int32)
        check_column(rotary_positions, "rotary_positions", tokens, torch.int32)
        check_column(batch.slots, "slots", tokens, torch.int32)
        check_batch(batch, tokens)
        if rows is not None:
            check_column(rows, "rows", len(rows), torch.int64)
        max_positions, rotary_dim = check_rotary_table(cos_sin, self._shape.head_dim)
        tables = batch.block_tables
        columns = DecoderPass(
            tokens,
            token_ids.data_ptr(),
            rotary_positions.data_ptr(),
            cos_sin.data_ptr(),
            max_positions,
            rotary_dim,
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            tables.shape[0],
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            tables.shape[1],
            None if rows is None else rows.data_ptr(),
            -1 if rows is None else len(rows),
        )
        if kv_layers is not self._kv_layers:
            self._describe_kv(kv_layers)
        count = len(self._layers)
        at_once = 1 if tokens >= _MANY_TOKENS else count
        decoder, pass_, pointer = ctypes.byref(self._struct), ctypes.byref(columns), x.data_ptr()
        compute = self._backend.library.octavo_decoder_layers
        for first in range(0, count, at_once):
            self._backend.check(compute(self._backend.context, decoder, self._paged, first, at_once, pass_, pointer))
            on_progress()
        return x if rows is None else x[: len(rows)]

    def _check_layer(self, layer: DecoderLayer, inner: int) -> None:
        """Refuses what the library would read beyond: it trusts widths and dtypes."""
        shape, hidden = self._shape, self._hidden
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        for name, linear, inputs, outputs in (
            ("qkv", layer.qkv, hidden, q_width + 2 * kv_width),
            ("output", layer.output, q_width, hidden),
            ("gate_up", layer.gate_up, hidden, 2 * inner),
            ("down", layer.down, inner, hidden),
        ):
            native = _linear(linear, name)
            if (native.in_features, native.out_features, native.dtype) != (inputs, outputs, self._dtype):
                raise InvalidArgumentError(
                    f"{name} is {native.out_features} x {native.in_features} of {native.dtype}; "
                    f"{outputs} x {inputs} of {self._dtype} is needed"
                )
        norm_dtype = self._layers[0].input_norm.dtype
        if norm_dtype not in (self._dtype, torch.float32):
            refuse("input_norm", layer.input_norm, f"{self._dtype} or float32 is needed")
        check_column(layer.input_norm, "input_norm", hidden, norm_dtype)
        check_column(layer.mlp_norm, "mlp_norm", hidden, norm_dtype)
        if (layer.q_norm is None) != (layer.k_norm is None):
            raise InvalidArgumentError("a layer has one of q_norm and k_norm; both or none are needed")
        for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
            if norm is not None:
                check_column(norm, name, shape.head_dim, norm_dtype)

    def _describe_kv(self, kv_layers: Sequence[LayerKV]) -> None:
        paged = [self._backend.paged_kv(kv) for kv in kv_layers]
        first, shape = paged[0], self._shape
        of_one_pool = ("dtype", "block_stride", "head_stride", "num_blocks", "num_kv_heads", "head_dim", "block_size")
        fits = (
            (kv_layers[0].k_scales is not None or first.dtype == DTYPES[self._dtype])
            and first.num_kv_heads == shape.num_kv_heads
            and first.head_dim == shape.head_dim
        )
        if len(paged) != len(self._layers) or not fits:
            raise InvalidArgumentError(
                f"kv_layers are {len(paged)} of {tuple(kv_layers[0].k.shape)} of {kv_layers[0].k.dtype}; "
                f"{len(self._layers)} of (blocks, {shape.num_kv_heads}, {shape.head_dim}, block_size) of "
                f"{self._dtype} are needed"
            )
        if any(getattr(kv, name) != getattr(first, name) for kv in paged for name in of_one_pool):
            raise InvalidArgumentError("kv_layers have different shapes; the layers of one pool are needed")
        self._kv_layers = kv_layers  # kept, so that another one never has its identity
        self._paged = (PagedKV * len(paged))(*paged)


def _linear(linear: object, name: str) -> CpuLinear:
    if not isinstance(linear, CpuLinear):
        raise InvalidArgumentError(f"{name} is a {type(linear).__name__}; one of the cpu backend's is needed")
    return linear


def _pointers(layer: DecoderLayer) -> DecoderLayerPointers:
    def of(norm: Tensor | None) -> int | None:
        return None if norm is None else norm.data_ptr()

    return DecoderLayerPointers(
        _linear(layer.qkv, "qkv").handle.value,
        _linear(layer.output, "output").handle.value,
        _linear(layer.gate_up, "gate_up").handle.value,
        _linear(layer.down, "down").handle.value,
        of(layer.input_norm),
        of(layer.mlp_norm),
        of(layer.q_norm),
        of(layer.k_norm),
        layer.sliding_window or 0,
    )
