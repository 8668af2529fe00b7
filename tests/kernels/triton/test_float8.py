"""E4M3 by bits: every number there is, and rounding between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo_kernels.triton.float8 import decode_e4m3, encode_e4m3


@triton.jit
def _decode_kernel(bits_ptr, out_ptr):
    offsets = tl.arange(0, 256)
    tl.store(out_ptr + offsets, decode_e4m3(tl.load(bits_ptr + offsets)).to(tl.float32))


@triton.jit
def _encode_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out_ptr + offsets, encode_e4m3(tl.load(x_ptr + offsets, mask=inside, other=0.0)), mask=inside)


def encode(x):
    out = torch.empty(len(x), dtype=torch.uint8)
    _encode_kernel[(1,)](x, out, len(x), BLOCK=triton.next_power_of_2(len(x)))
    return out


def test_decodes_every_number():
    bits = torch.arange(256).to(torch.uint8)
    out = torch.empty(256)
    _decode_kernel[(1,)](bits, out)
    expected = bits.view(torch.float8_e4m3fn).float()
    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    assert torch.equal(out[is_number] * 256, expected[is_number])
    assert out.isfinite().all()


def test_encodes_every_number():
    bits = torch.arange(256).to(torch.uint8)
    numbers = bits.view(torch.float8_e4m3fn).float()
    is_number = ~numbers.isnan()
    assert torch.equal(encode(numbers[is_number]), bits[is_number])


def test_rounds_to_nearest_even():
    positive = torch.arange(0x7F).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (positive[1:] + positive[:-1]) / 2
    x = torch.cat((middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(500.0))))
    x = torch.cat((x, -x, torch.randn(1000) * 10, torch.tensor([1e-12, 1e-40])))
    assert torch.equal(encode(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_ends_at_the_largest():
    x = torch.tensor([448.0, 449.0, 1e9, float("inf"), -1e9, float("nan")])
    assert encode(x).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E]
