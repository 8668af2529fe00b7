"""E4M3 numbers by their bits, for GPUs without instructions for them (Micikevicius et al., FP8 Formats for Deep
Learning, 2022): sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinities, 448 the largest.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(bits):
    """The numbers that a tensor of uint8 stands for, divided by 256: fp16, exactly. Knows no NaN.

    The bits of exponent and mantissa fall on those of fp16, whose bias is larger by 8.
    """
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """uint8 of a tensor of fp32, rounded to nearest even, at most 448 in magnitude. NaN becomes 448."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 2^-6 up: round away 20 bits of mantissa, then move the bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below, the step is 2^-9; adding 1.5 * 2^23 rounds to an integer in the low bits.
    small = (magnitude.to(tl.float32, bitcast=True) * 512.0 + 12582912.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))  # 2^-6
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
