"""Exact helpers on IEEE bit patterns, the same on CPU and CUDA.

Powers of two are built from exponent bits: ``torch.pow(2.0, e)`` is inexact on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the exponent sits in a binary floating-point type, and the integer type of the same width."""

    float_dtype: torch.dtype
    int_dtype: torch.dtype
    mantissa_bits: int
    bias: int

    @property
    def exponent_mask(self) -> int:
        """The exponent field's bits, in place."""
        return (2 * self.bias + 1) << self.mantissa_bits

    def field(self, exponent: int) -> int:
        """The bits of ``2.0 ** exponent``."""
        return (exponent + self.bias) << self.mantissa_bits


FP32 = Layout(torch.float32, torch.int32, 23, 127)
FP64 = Layout(torch.float64, torch.int64, 52, 1023)

_NAN_BITS = {torch.float32: 0x7FFFFFFF, torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF}
_INT_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def canonical_nan(x: Tensor) -> Tensor:
    """Give every NaN of ``x`` the payload NVIDIA hardware writes (0x7FFFFFFF; 0x7FFF in bf16 and fp16).

    Source: recorded on an H200, ``tests/emulation/test_golden.py``.

    >>> hex(canonical_nan(torch.tensor([float("nan")])).view(torch.int32).item())
    '0x7fffffff'
    """
    bits = x.view(_INT_OF[x.dtype])
    return torch.where(x.isnan(), torch.full_like(bits, _NAN_BITS[x.dtype]), bits).view(x.dtype)


def two_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The float64 sum of ``x`` and ``y`` and its exact error (Knuth); the error is NaN where the sum is not finite."""
    total = x + y
    shadow = total - x
    return total, (x - (total - shadow)) + (y - shadow)


def add_to_odd(x: Tensor, y: Tensor) -> Tensor:
    """``x + y`` in float64, rounded to odd: a later rounding to fp32 is then the only one that shows.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums" (2008).
    """
    total, error = two_sum(x, y)
    bits = total.view(torch.int64)
    inexact_and_even = (error != 0) & total.isfinite() & ((bits & 1) == 0)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_and_even, bits + toward, bits).view(torch.float64)


def fma_fp32(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``x * y + z`` in fp32 with a single rounding (nearest even), elementwise and broadcasting.

    The product of two fp32 values is exact in float64.
    """
    return add_to_odd(x.double() * y.double(), z.double()).float()


def floor_pow2(x: Tensor, layout: Layout) -> Tensor:
    """``2 ** floor(log2(|x|))`` for normal ``x``, and 0 for 0; subnormals of the type itself count as 0."""
    return (x.view(layout.int_dtype) & layout.exponent_mask).view(layout.float_dtype)


def truncate_significand(x: Tensor, bits: int, layout: Layout) -> Tensor:
    """Truncate ``x`` in place, toward zero, to ``bits`` significant bits."""
    x.view(layout.int_dtype).bitwise_and_(-1 << (layout.mantissa_bits + 1 - bits))
    return x
