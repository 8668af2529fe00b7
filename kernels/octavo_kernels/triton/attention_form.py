"""Attention in the forms that the compile table compiles: what both kernels have in common of their `Variant`s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo_kernels.triton.paged_kv import TL_DTYPES, compute_dtype, tile_constants
from octavo_kernels.triton.variant import AMPERE, HOPPER, Variant

_FLOATS = ("scale", "v_unit", "soft_cap")
_COLUMNS = ("tables_ptr", "query_starts_ptr", "positions_ptr")
_GIVEN = {"q_ptr", "out_ptr"}
_STORED = {"k_ptr", "v_ptr"}


@dataclass(frozen=True)
class AttentionForm:
    """What a kernel of attention is compiled for, apart from the shape of its programs.

    group: query heads of a KV head; stored: Triton's name of the dtype of quantized K and V, None for `dtype`; options:
    of "window", "cap" and "sinks"
    """

    head_dim: int
    dtype: torch.dtype
    group: int
    block_size: int = 16
    stored: str | None = None
    options: tuple[str, ...] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether K and V have scales."""
        return self.stored is not None

    @property
    def compute(self) -> torch.dtype:
        """The dtype of the matrix products."""
        is_float8 = self.stored in ("u8", "fp8e4nv")
        return compute_dtype(self.dtype, torch.float8_e4m3fn if is_float8 else self.dtype, interpreted=False)

    @property
    def targets(self) -> tuple[int, ...]:
        """Compute capabilities that the form is launched on: e4m3 as it is or by its bits, as a GPU reads it."""
        return {"fp8e4nv": (HOPPER,), "u8": (AMPERE,)}.get(self.stored or "", (AMPERE, HOPPER))

    def variant(
        self,
        kernel: Any,
        constants: Mapping[str, Any],
        *,
        num_warps: int,
        num_stages: int,
        targets: tuple[int, ...],
        unaligned: frozenset[str],
        absent: tuple[str, ...] = (),
        note: str = "",
    ) -> Variant:
        """The variant of a kernel with constants of its own. absent: its pointers that are None; note: for its name."""
        name = str(TL_DTYPES[self.dtype])
        everything = {
            "NUM_HEADS": 8 * self.group,
            "GROUP": self.group,
            "HAS_WINDOW": "window" in self.options,
            "HAS_CAP": "cap" in self.options,
            "COMPUTE": TL_DTYPES[self.compute],
            **tile_constants(self.head_dim, self.block_size, self.is_quantized),
            **constants,
            **dict.fromkeys(absent),
            **({} if self.is_quantized else dict.fromkeys(("k_scales_ptr", "v_scales_ptr"))),
            **({} if "sinks" in self.options else {"sinks_ptr": None}),
        }
        kinds = dict.fromkeys(_FLOATS, "fp32") | dict.fromkeys(_COLUMNS, "*i32")
        kinds |= dict.fromkeys(_GIVEN, f"*{name}") | dict.fromkeys(_STORED, f"*{self.stored or name}")
        signature = {
            argument: kinds.get(argument, "*fp32" if argument.endswith("_ptr") else "i32")
            for argument in kernel.arg_names
            if argument not in everything
        }
        words = (f"head {self.head_dim}", f"{self.group} a KV head", name, f"block {self.block_size}")
        return Variant(
            ", ".join((*words, self.stored or name, *self.options, *([note] if note else []))),
            kernel,
            signature,
            everything,
            num_warps,
            num_stages,
            unaligned=unaligned | {"sliding_window", "table_stride"},
            targets=targets,
        )
