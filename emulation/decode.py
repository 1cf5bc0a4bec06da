"""FP8 codes as the numbers a step computes with, through fp16's bits: torch's own conversion is ten times slower."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8ref.emulation.bits import Layout, floor_pow2
from fp8ref.emulation.formats import Fp8Format
from fp8ref.emulation.units import TensorCoreUnit

Span = tuple[int, int]
"""The k of one chain: from the first number to before the second."""

_FP16_BIAS = 15
_FP16_MANTISSA_BITS = 10
_CHUNK = {"cpu": 1 << 16}
_DEVICE_CHUNK = 1 << 24

POWER = 8
"""Exponents of :func:`decode`'s powers are this far apart: a sum of up to 64 of them still shows the largest."""


def decode(codes: Tensor, fmt: Fp8Format, values_in: Layout, powers_in: Layout) -> tuple[Tensor, Tensor]:
    """Return the values of finite FP8 codes, and ``2 ** (8 * e)`` for the exponent e of each (0 for zero).

    Args:
        codes: uint8, contiguous, any shape.
        fmt: their format; subnormals have its smallest normal exponent.
        values_in: float32 or float64, for the values.
        powers_in: the same for the powers; float32 holds those of e4m3 only.

    >>> from fp8ref.emulation.bits import FP32
    >>> from fp8ref.emulation.formats import E4M3
    >>> decode(torch.tensor([0x38, 0x01, 0x80], dtype=torch.uint8), E4M3, FP32, FP32)[0]
    tensor([1.0000, 0.0020, -0.0000])
    """
    values = torch.empty(codes.shape, dtype=values_in.float_dtype, device=codes.device)
    powers = torch.empty(codes.shape, dtype=powers_in.float_dtype, device=codes.device)
    chunk = _CHUNK.get(codes.device.type, _DEVICE_CHUNK)
    pieces = (flat.view(-1).split(chunk) for flat in (codes, values, powers))
    for code, value, power in zip(*pieces, strict=True):
        _decode_values(code, fmt, value)
        _powers_of(value.to(powers_in.float_dtype), fmt, powers_in, power)
    return values, powers


def _decode_values(codes: Tensor, fmt: Fp8Format, out: Tensor) -> None:
    """Move exponent and mantissa into an fp16 of the same sign; one exact multiplication makes up for its bias."""
    shift = _FP16_MANTISSA_BITS - fmt.mantissa_bits
    bits = codes.view(torch.int8).to(torch.int16).mul_(torch.tensor(1 << shift, dtype=torch.int16, device="cpu"))
    # The widened sign fills the bits above the exponent: keep the topmost.
    keep = (0x7F << shift) - (1 << 15)
    bits.bitwise_and_(torch.tensor(keep, dtype=torch.int16, device="cpu"))
    out.copy_(bits.view(torch.float16))
    if fmt.bias != _FP16_BIAS:
        out.mul_(2.0 ** (_FP16_BIAS - fmt.bias))


def _powers_of(values: Tensor, fmt: Fp8Format, layout: Layout, out: Tensor) -> None:
    torch.clamp(floor_pow2(values, layout), min=2.0**fmt.e_min, out=out)
    out.mul_(values.sign())  # 0 for zero; the sign itself goes with the first square
    assert POWER == 8, "three squarings"
    for _ in range(3):
        out.mul_(out)


def k_order(unit: TensorCoreUnit, spans: Sequence[Span], k: int) -> Tensor | None:
    """The k that fills each slot of the padded chains, ``k`` itself for a zero; None where that changes nothing."""
    slots: list[Tensor] = []
    order = torch.tensor(unit.k_order, device="cpu")
    for start, stop in spans:
        instructions = -(-(stop - start) // unit.instruction_k)
        slot = start + (torch.arange(instructions, device="cpu").unsqueeze(1) * unit.instruction_k + order).flatten()
        slots.append(torch.where(slot < stop, slot, k))
    joined = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64, device="cpu")
    return None if torch.equal(joined, torch.arange(k, device="cpu")) else joined
