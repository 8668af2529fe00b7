"""Kernels in the forms in which they ship: what the compile table compiles, and tests look at.

A file of an op has a function `variants()` that returns its kernels as `Variant`s: representative ones of every dtype
and size that the op chooses differently for, not every combination. `compile_table` collects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AMPERE, HOPPER = 80, 90


@dataclass(frozen=True)
class Variant:
    """One kernel with the types of its arguments and its compile-time constants.

    name:       what a person calls it: "head 128, bf16, KV fp8"
    kernel:     the `@triton.jit` function
    signature:  each argument that is no constant, with Triton's name of its type: {"x_ptr": "*bf16", "n": "i32"}
    constants:  each `tl.constexpr` argument, and each argument that is None, with its value
    unaligned:  arguments that are not known to be multiples of 16; pointers and integers are by default, as Triton
                finds out at a launch
    targets:    compute capabilities that this form is launched on
    spills:     whether registers may spill to memory
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    unaligned: frozenset[str] = field(default_factory=frozenset)
    targets: tuple[int, ...] = (AMPERE, HOPPER)
    spills: bool = False
