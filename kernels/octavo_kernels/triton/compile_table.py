"""Compiles every kernel for the GPUs it ships for, without a GPU, and reports what each one takes.

    python -m octavo_kernels.triton.compile_table [--op NAME ...] [--json FILE]

prints registers a thread, shared memory a program and the stack a thread, which is where registers spill to, of every
`Variant` on every target, as the CUDA tools that come with Triton read them out of the machine code. Compiled kernels
are kept in Triton's cache. Ends with status 1 if a kernel spills that must not. It measures no time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from octavo_kernels.triton.variant import Variant

# The files that have kernels, each with a function `variants()`.
OPS = (
    "advance_decode",
    "paged_attention_decode",
    "paged_attention_prefill",
    "write_kv",
    "rotary_write_kv",
    "blocks",
    "rms_norm",
    "rotary",
    "silu_mul",
    "ban_tokens",
    "least_kept",
    "gumbel_argmax",
    "quantize_rows",
    "linear_int8",
    "linear_fp8",
    "linear_w4a16",
    "linear_tiles",
)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one target.

    registers: of a thread, at most 255; shared: bytes of a program; stack: bytes of a thread.
    """

    op: str
    kernel: str
    variant: str
    target: int
    num_warps: int
    registers: int
    shared: int
    stack: int
    may_spill: bool

    @property
    def is_good(self) -> bool:
        """Whether it keeps its registers, if it must."""
        return self.stack == 0 or self.may_spill


def variants(op: str) -> list[Variant]:
    """The variants of the file `op`."""
    made: list[Variant] = importlib.import_module(f"octavo_kernels.triton.{op}").variants()
    return made


def compile_variant(variant: Variant, target: int) -> tuple[str, bytes, int]:
    """PTX, cubin and bytes of shared memory of one kernel for one compute capability; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    unknown = (set(variant.signature) | set(variant.constants)) ^ set(names)
    if unknown:
        raise ValueError(f"{variant.kernel.__name__}, {variant.name}: arguments do not match: {sorted(unknown)}")
    signature = {name: "constexpr" if name in variant.constants else variant.signature[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith(("*", "i")) and name not in variant.unaligned
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constants), aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared


def read_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, out of machine code."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _USAGE.search(text)
    if found is None:
        raise ValueError(f"no resource usage in the output of {' '.join(command)}:\n{text}")
    registers, stack, _, local = map(int, found.groups())
    return registers, stack + local


def measure(op: str, index: int, target: int) -> Usage:
    """Compiles one variant, named by its place so that a process of its own can do it."""
    variant = variants(op)[index]
    _, cubin, shared = compile_variant(variant, target)
    registers, stack = read_usage(cubin)
    kernel = variant.kernel.__name__
    return Usage(op, kernel, variant.name, target, variant.num_warps, registers, shared, stack, variant.spills)


def compile_all(ops: Sequence[str], workers: int) -> list[Usage]:
    """Compiles all variants of `ops` in as many processes as `workers`."""
    jobs = [(op, i, target) for op in ops for i, variant in enumerate(variants(op)) for target in variant.targets]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(measure, *zip(*jobs, strict=True)))


def table(usages: Sequence[Usage]) -> str:
    """The usages as a Markdown table."""
    head = ("kernel", "variant", "target", "warps", "registers", "shared, bytes", "stack, bytes")
    rows = [
        (
            u.kernel.strip("_").removesuffix("_kernel"),
            u.variant,
            f"sm_{u.target}",
            *(str(n) for n in (u.num_warps, u.registers, u.shared, u.stack)),
        )
        for u in usages
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (head, *rows)
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main() -> int:
    """Parses the command line, compiles, prints. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="only these files of kernels")
    parser.add_argument("--json", type=Path, help="write the table to this file as well, as JSON")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that compile")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        print("TRITON_INTERPRET is set: interpreted kernels cannot be compiled; unset it", file=sys.stderr)
        return 2
    usages = compile_all(args.op, args.workers)
    print(table(usages))
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(u) for u in usages], indent=1))
    spilling = [u for u in usages if not u.is_good]
    for u in spilling:
        print(f"{u.kernel}, {u.variant}, on sm_{u.target} spills {u.stack} bytes a thread", file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
