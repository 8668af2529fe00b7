"""Loads the native library and declares its C interface (csrc/api.cpp). Says why where it cannot.

Checks nothing of what the functions are given: that is `backend.py`'s part.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from octavo_kernels.errors import BackendUnavailableError

LIBRARY_PATH = Path(__file__).with_name("liboctavo_cpu.so")
# Forces an instruction set; for tests and for comparing machines.
ISA_VARIABLE = "OCTAVO_CPU_ISA"
_INTERFACE_VERSION = 7


class PagedKV(Structure):
    """`PagedKV` of csrc/common.h; strides in elements."""

    _fields_ = (
        ("dtype", c_int32),
        ("k", c_void_p),
        ("v", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
    )


class DecoderLayerPointers(Structure):
    """`DecoderLayer` of csrc/decoder.cpp."""

    _fields_ = (
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sliding_window", c_int64),
    )


class DecoderStruct(Structure):
    """`Decoder` of csrc/decoder.cpp."""

    _fields_ = (
        ("dtype", c_int32),
        ("norm_dtype", c_int32),
        ("hidden_size", c_int64),
        ("inner_size", c_int64),
        ("num_heads", c_int64),
        ("norm_eps", c_float),
        ("scale", c_float),
        ("embedding", c_void_p),
        ("vocab_size", c_int64),
        ("layers", POINTER(DecoderLayerPointers)),
        ("num_layers", c_int64),
        ("last_norm", c_void_p),
    )


class DecoderPass(Structure):
    """`DecoderPass` of csrc/decoder.cpp; strides in elements."""

    _fields_ = (
        ("tokens", c_int64),
        ("token_ids", c_void_p),
        ("rotary_positions", c_void_p),
        ("cos_sin", c_void_p),
        ("max_positions", c_int64),
        ("rotary_dim", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("sequences", c_int64),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("table_columns", c_int64),
        ("wanted", c_void_p),
        ("wanted_count", c_int64),
    )


_P, _I, _N, _KV = c_void_p, c_int32, c_int64, POINTER(PagedKV)
_DECODER, _PASS = POINTER(DecoderStruct), POINTER(DecoderPass)

# Arguments, the context first, of the functions that return 0 or a status with a message.
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "octavo_linear_create": (_P, _I, _I, _P, _N, _N, _N, _P, POINTER(c_void_p)),
    "octavo_linear_create_int8": (_P, _I, _I, _P, _N, _N, _N, _P, _N, POINTER(c_void_p)),
    "octavo_linear_create_int4": (_P, _I, _I, _P, _P, _P, _N, _N, _P, POINTER(c_void_p)),
    "octavo_linear": (_P, _P, _P, _N, _N, _P, _N, _P),
    "octavo_linear_argmax": (_P, _P, _P, _N, _N, _P),
    "octavo_decoder_layers": (_P, _DECODER, _KV, _N, _N, _PASS, _P),
    "octavo_rms_norm": (_P, _I, _I, _P, _N, _N, _N, _N, _N, _P, c_float, _P),
    "octavo_rotary": (_P, _I, _P, _N, _N, _N, _N, _P, _P, _N, _N),
    "octavo_silu_mul": (_P, _I, _P, _N, _N, _N, _P),
    "octavo_write_kv": (_P, _KV, _I, _P, _N, _P, _N, _P, _N),
    "octavo_paged_attention": (_P, _KV, _I, _P, _N, _N, _N, _N, _P, _P, _P, _P, _N, _N, c_float, _N, _P),
    "octavo_gumbel_argmax": (_P, _P, _N, _N, _N, _P, _P, _P, _P),
    "octavo_ban_tokens": (_P, _P, _N, _N, _N, _P, _N, _P, _N),
    "octavo_move_blocks": (_P, _P, _N, _P, _P, _N, _P, _N, _N),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library with its functions declared. Raises BackendUnavailableError."""
    if not LIBRARY_PATH.exists():
        raise BackendUnavailableError(
            f"{LIBRARY_PATH} was not built; install a C++17 compiler (g++ or clang++) and install octavo-kernels again"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise BackendUnavailableError(f"{LIBRARY_PATH} cannot be loaded: {error}") from error
    version = library.octavo_interface_version()
    if version != _INTERFACE_VERSION:
        raise BackendUnavailableError(
            f"{LIBRARY_PATH} has interface version {version} and {_INTERFACE_VERSION} is needed; "
            "install octavo-kernels again"
        )
    library.octavo_last_error.restype = c_char_p
    library.octavo_isa.argtypes = (_I,)
    library.octavo_isa.restype = c_char_p
    library.octavo_context_create.argtypes = (c_char_p, _I, _N, POINTER(c_void_p))
    library.octavo_context_destroy.argtypes = (_P,)
    library.octavo_context_destroy.restype = None
    library.octavo_linear_destroy.argtypes = (_P,)
    library.octavo_linear_destroy.restype = None
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    return library


def supported_isas() -> list[str]:
    """Instruction sets that the library has and this machine runs, most capable first."""
    library = load_library()
    names: list[str] = []
    while (name := library.octavo_isa(len(names))) is not None:
        names.append(name.decode())
    return names


def choose_isa(wanted: str | None = None) -> str:
    """`wanted`, or what the environment variable OCTAVO_CPU_ISA names, or the most capable one.

    Raises BackendUnavailableError where this machine does not run it.
    """
    supported = supported_isas()
    name = wanted or os.environ.get(ISA_VARIABLE) or supported[0]
    if name not in supported:
        raise BackendUnavailableError(
            f"instruction set {name!r} is not available; this machine runs {', '.join(supported)}"
        )
    return name


def why_unavailable() -> str | None:
    """None where the native backend runs on this machine, otherwise the reason why it does not."""
    try:
        choose_isa()
    except BackendUnavailableError as error:
        return str(error)
    return None
