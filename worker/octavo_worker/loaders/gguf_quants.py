"""Turns the bytes of a GGUF tensor into values, or into groups of 4 bits where it is stored in such.

One function a block format, each on (blocks, bytes of a block) uint8 and giving (blocks, values of a block) fp32,
written from ggml's reference `dequantize_row_*` (ggml-quants.c). Finding the bytes is for `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo_worker.loaders.gguf import QuantType


def dequantize(data: Tensor, quant_type: QuantType, dtype: torch.dtype) -> Tensor:
    """The values of a tensor, flat, in `dtype`; computed in fp32 and rounded once. data: (bytes,) uint8."""
    plain = _PLAIN.get(quant_type.name)
    if plain is not None:
        return data.view(plain).to(dtype)
    blocks = data.view(-1, quant_type.block_bytes)
    return _BLOCKS[quant_type.name](blocks).to(dtype).flatten()


def int4_groups(data: Tensor, quant_type: QuantType) -> tuple[Tensor, Tensor, Tensor] | None:
    """The 4-bit integers of a tensor, flat (uint8), with the scales and minimums of each 32 of them (fp16).

    A value is scale * integer + minimum: exactly the file's for Q4_0 and Q4_1; Q4_K's scales and minimums are products,
    rounded to fp16 here. None for a type of other groups or bits. data: (bytes,) uint8.
    """
    read = _INT4_BLOCKS.get(quant_type.name)
    if read is None:
        return None
    integers, scales, minimums = read(data.view(-1, quant_type.block_bytes))
    return integers.flatten(), scales.half().flatten(), minimums.half().flatten()


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of every block, (blocks, 1) fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(data: Tensor, bits: int, width: int) -> Tensor:
    """Unpacks fields of `bits` bits. (blocks, n * width) bytes give (blocks, n * 8/bits * width) values.

    Of each stretch of `width` bytes the lowest fields come first, then the next ones, as ggml stores them.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).view(1, 1, -1, 1)
    values = (data.reshape(data.shape[0], -1, 1, width) >> shifts) & ((1 << bits) - 1)
    return values.flatten(1)


def _high_bits(data: Tensor) -> Tensor:
    """The 32 bits of 4 little-endian bytes, one a value, moved to bit 4. (blocks, 4) gives (blocks, 32) uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (((data.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:18], 4, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:20], 4, 16).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    values = _fields(blocks[:, 6:22], 4, 16) | _high_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (values.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _fields(blocks[:, 8:24], 4, 16) | _high_bits(blocks[:, 4:8])
    return _half(blocks, 0) * values.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:34].view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, 0:16]
    steps = _half(blocks, 80) * (scales & 0xF).float()
    minimums = _half(blocks, 82) * (scales >> 4).float()
    values = _fields(blocks[:, 16:80], 2, 32).view(-1, 16, 16).float()
    return (steps.unsqueeze(-1) * values - minimums.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    scales = _fields(packed[:, 0:8], 4, 8) | (_fields(packed[:, 8:12], 2, 4) << 4)
    steps = _half(blocks, 108) * (scales.float() - 32)
    low = _fields(blocks[:, 32:96], 2, 32)
    high = _fields(blocks[:, 0:32], 1, 32)  # a set bit means that 4 is not subtracted
    values = (low.float() + 4 * high.float() - 4).view(-1, 16, 16)
    return (steps.unsqueeze(-1) * values).flatten(1)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of Q4_K and Q5_K: 2 * 8 numbers of 6 bits in 12 bytes, (blocks, 8) fp32 each."""
    scales, minimums, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    return (
        torch.cat([scales & 63, (rest & 0xF) | ((scales >> 6) << 4)], dim=1).float(),
        torch.cat([minimums & 63, (rest >> 4) | ((minimums >> 6) << 4)], dim=1).float(),
    )


def _q4_k(blocks: Tensor) -> Tensor:
    return _scale_k(blocks, _fields(blocks[:, 16:144], 4, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    return _scale_k(blocks, _fields(blocks[:, 48:176], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << 4))


def _int4_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _half(blocks, 0)
    return _fields(blocks[:, 2:18], 4, 16), scales, -8 * scales


def _int4_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _fields(blocks[:, 4:20], 4, 16), _half(blocks, 0), _half(blocks, 2)


def _int4_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    return _fields(blocks[:, 16:144], 4, 32), _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _scale_k(blocks: Tensor, values: Tensor) -> Tensor:
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    steps, offsets = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return (steps.unsqueeze(-1) * values.view(-1, 8, 32).float() - offsets.unsqueeze(-1)).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high = _fields(blocks[:, 0:128], 4, 64), _fields(blocks[:, 128:192], 2, 32)
    steps = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    values = ((low | (high << 4)).float() - 32).view(-1, 16, 16)
    return (steps.unsqueeze(-1) * values).flatten(1)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_INT4_BLOCKS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "Q4_0": _int4_q4_0,
    "Q4_1": _int4_q4_1,
    "Q4_K": _int4_q4_k,
}
