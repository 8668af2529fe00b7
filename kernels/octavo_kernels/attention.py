"""Attention of one's own: what such a class is made of, is given and gives back, and a backend that uses one.

    class MyAttention:
        row_invariant = False
        only_enqueues = True

        def __init__(self, setup: AttentionSetup) -> None: ...
        def __call__(self, q, kv, batch, options): ...

Everything else (projections, rotary positions, writing K and V, sampling) stays with the backend. How such a class is
named and found is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from octavo_kernels.backend import AttentionBatch, Backend, DecoderLayer, DecoderShape, LayerKV
from octavo_kernels.errors import InvalidArgumentError
from octavo_kernels.layers import ComposedLayers


@dataclass(frozen=True)
class AttentionSetup:
    """What an attention is made for, once, at start.

    num_heads, num_kv_heads, head_dim: of every layer; block_size: tokens in a KV block; dtype: of queries and outputs;
    kv_dtype: of stored K and V; backend: the kernels that it stands in for, whose `paged_attention` it may call.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    backend: Backend


@dataclass(frozen=True)
class AttentionOptions:
    """How one layer attends.

    scale: of the scores; sliding_window: positions that a token sees, itself included, or None for all; soft_cap:
    scores become soft_cap * tanh(score / soft_cap), or None; sinks: (num_heads,) fp32, a score of nothing that takes
    its share of each head's softmax, or None.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def given(self) -> dict[str, Any]:
        """The options that are set, as arguments of `Backend.paged_attention`."""
        named = {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap, "sinks": self.sinks}
        return {"scale": self.scale, **{name: value for name, value in named.items() if value is not None}}


class Attention(Protocol):
    """Attention over paged K and V: a class whose one argument is an `AttentionSetup`.

    row_invariant: whether a token's output has the same bits whatever other tokens are computed beside it; otherwise a
    request's tokens may depend on its neighbours. only_enqueues: whether a call never waits for the device nor looks at
    values there, and always asks the same work for inputs of the same shapes: a CUDA graph needs that, and without it
    decode steps are computed op by op.
    """

    row_invariant: bool
    only_enqueues: bool

    def __call__(self, q: Tensor, kv: LayerKV, batch: AttentionBatch, options: AttentionOptions) -> Tensor:
        """Causal attention of every query token over its sequence's blocks, to which K and V of these tokens were
        written already.

        q: (T, num_heads, head_dim), may be strided in dim 0, not to be kept; kv: of one layer, not to be mutated;
        batch: where the tokens stand, see `AttentionBatch`: rows of block_tables are padded, and what the pool holds
        beyond a context may be anything, NaN too. Returns a contiguous (T, num_heads * head_dim) of q's dtype, of which
        rows that belong to no sequence may be anything.
        """
        ...


class BackendWithAttention:
    """A backend, but for its attention.

    Only the ops of `Backend` are passed on: a backend's own ways to do several at once would leave the attention out.
    """

    def __init__(self, backend: Backend, attention: Attention, name: str) -> None:
        """name: of the attention, for people."""
        self._backend, self._attention, self._name = backend, attention, name
        self.name, self.device = backend.name, backend.device
        self.has_fast_int8, self.has_float8 = backend.has_fast_int8, backend.has_float8
        self.row_invariant = backend.row_invariant and attention.row_invariant
        self.only_enqueues = backend.only_enqueues and attention.only_enqueues

    def describe(self) -> str:
        """See `Backend.describe`."""
        return f"{self._backend.describe()}, attention {self._name}"

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: AttentionBatch, *, scale: float, **options: Any) -> Tensor:
        """See `Backend.paged_attention`."""
        return self._attention(q, kv, batch, AttentionOptions(scale, **options))

    def decoder_layers(
        self, embedding: Tensor, layers: Sequence[DecoderLayer], last_norm: Tensor, shape: DecoderShape
    ) -> ComposedLayers:
        """See `Backend.decoder_layers`: op by op, so that the attention is among them."""
        return ComposedLayers(cast(Backend, self), embedding, layers, last_norm, shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not (hasattr(Backend, name) or name in Backend.__annotations__):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._backend, name)


def check_attention(attention: Attention, setup: AttentionSetup, layer: LayerKV) -> None:
    """Calls an attention once, for a prompt of two tokens and a decode, on a layer of two blocks or more.

    Raises InvalidArgumentError for an output of a shape, dtype or device that `Attention` does not promise.
    """

    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=setup.device)

    for name in ("row_invariant", "only_enqueues"):
        if not isinstance(getattr(attention, name, None), bool):
            raise InvalidArgumentError(f"it has no {name}, which must be True or False")
    block = setup.block_size
    batch = AttentionBatch(
        positions=column(0, 1, 2),
        slots=column(0, 1, block + 2),
        query_starts=column(0, 2, 3),
        context_lens=column(2, 3),
        block_tables=column(0, 1)[:, None],
    )
    q = torch.zeros((3, setup.num_heads, setup.head_dim), dtype=setup.dtype, device=setup.device)
    out = attention(q, layer, batch, AttentionOptions(setup.head_dim**-0.5))
    if not isinstance(out, Tensor):
        raise InvalidArgumentError(f"it returns a {type(out).__name__}; a tensor is needed")
    wanted = (3, setup.num_heads * setup.head_dim)
    if out.shape != wanted or out.dtype is not setup.dtype or out.device != q.device or not out.is_contiguous():
        raise InvalidArgumentError(
            f"it returns shape {tuple(out.shape)}, dtype {out.dtype} on {out.device} for three tokens; contiguous "
            f"{wanted} of {setup.dtype} on {q.device} is needed"
        )
