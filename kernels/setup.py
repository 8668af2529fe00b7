"""Builds the native CPU library of octavo-kernels.

It is a plain shared library with a C interface, loaded with ctypes: it needs a C++17 compiler, and neither torch nor
Python's headers. `isa.cpp` is compiled once for each instruction set of the machine's architecture; the library picks
one when it is loaded. Without a compiler the install succeeds all the same, and the reference backend serves.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("octavo_kernels/cpu/csrc")
LIBRARY = "liboctavo_cpu.so"

# No contraction: where a multiply-add is fused is written in the source, never chosen by the compiler.
COMMON_FLAGS = ["-O3", "-g0", "-std=c++17", "-pthread", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
# Python's own flags come before these and have signed integers wrap: attention of prompts is a twentieth slower so.
COMMON_FLAGS += ["-fno-wrapv"]
# The vector extension's calling convention is never used across units; GCC 12's intrinsics headers warn by mistake.
VECTOR_FLAGS = [*COMMON_FLAGS, "-Wno-psabi", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]


def instruction_sets() -> dict[str, list[str]]:
    """Name and compiler flags of every variant of `isa.cpp` that this architecture has."""
    if platform.machine() in ("x86_64", "AMD64"):
        # vdpbf16ps is written in assembly, so the last variant needs no flag of its own.
        return {"generic": [], "avx2": AVX2, "avx512": AVX512, "avx512_bf16": AVX512}
    return {"generic": []}


class BuildLibrary(build_ext):
    """Compiles `isa.cpp` several times and links everything into one library without Python's ABI in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        def compile_variant(variant: tuple[str, list[str]]) -> list[str]:
            isa, flags = variant
            objects: list[str] = self.compiler.compile(
                [str(SOURCES / "isa.cpp")],
                output_dir=str(Path(self.build_temp) / isa),
                macros=[("OCTAVO_ISA", isa), (f"OCTAVO_{isa.upper()}", "1")],
                extra_postargs=[*VECTOR_FLAGS, *flags],
                depends=ext.depends,
            )
            return objects

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
            compiled = list(threads.map(compile_variant, instruction_sets().items()))
        objects = [path for variant in compiled for path in variant]
        objects += self.compiler.compile(
            ext.sources, output_dir=self.build_temp, extra_postargs=COMMON_FLAGS, depends=ext.depends
        )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=["-pthread"], build_temp=self.build_temp, target_lang="c++"
        )


class PlatformWheel(bdist_wheel):
    """The library depends on the platform, not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "octavo_kernels.cpu.native",
            sources=[
                str(SOURCES / name) for name in ("api.cpp", "arena.cpp", "context.cpp", "decoder.cpp", "pool.cpp")
            ],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
